// Numbers short enough to compare.

const known = (value) => typeof value === "number" && Number.isFinite(value);

export function number(value, digits = 4) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6))
    return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return size >= 1000
    ? value.toLocaleString("en", { maximumFractionDigits: 0 })
    : String(Number(value.toFixed(digits)));
}

export function compact(value) {
  if (!known(value)) return "–";
  for (const [size, letter] of [
    [1e18, "E"],
    [1e15, "P"],
    [1e12, "T"],
    [1e9, "B"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${letter}`;
  }
  return String(Number(value.toPrecision(3)));
}

export function whole(value) {
  return known(value) ? Math.round(value).toLocaleString("en") : "–";
}

export function percent(value) {
  return known(value) ? `${(100 * value).toFixed(1)}%` : "–";
}

export function duration(seconds) {
  if (!known(seconds)) return "–";
  const all = Math.max(0, Math.floor(seconds));
  for (const [unit, size, lesser, below] of [
    ["d", 86400, "h", 3600],
    ["h", 3600, "m", 60],
    ["m", 60, "s", 1],
  ]) {
    if (all >= size)
      return `${Math.floor(all / size)}${unit} ${String(Math.floor((all % size) / below)).padStart(2, "0")}${lesser}`;
  }
  return `${all}s`;
}

// In its largest unit: 45s ago, 14m ago, 3h ago, 2d ago.
export function ago(seconds) {
  return known(seconds) ? `${duration(Date.now() / 1000 - seconds).split(" ")[0]} ago` : "–";
}

// The day, and the time where it is of the last half year.
export function date(seconds) {
  if (!known(seconds)) return "–";
  const when = new Date(1000 * seconds);
  const recent = Math.abs(Date.now() - when) < 183 * 86400e3;
  return recent
    ? when.toLocaleString("en", { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false })
    : when.toLocaleDateString("en", { year: "numeric", month: "short", day: "numeric" });
}

export function bytes(count) {
  if (!known(count)) return "–";
  let value = count,
    unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}
