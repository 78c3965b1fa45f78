// Points as a chart takes them, and the value of a curve at a place.

// {x, y} with rising x, each once: what a chart can draw. On a log axis only what is above zero is there.
export function clean(points, logX, logY) {
  const pairs = [];
  points.x.forEach((x, place) => {
    if ((!logX || x > 0) && (!logY || points.y[place] > 0)) pairs.push([x, points.y[place]]);
  });
  pairs.sort((a, b) => a[0] - b[0]);
  const last = pairs.filter((pair, place) => place + 1 === pairs.length || pair[0] !== pairs[place + 1][0]);
  return [last.map((pair) => pair[0]), last.map((pair) => pair[1])];
}

// {x, y} of a curve at x, or of its last point before it; undefined where it begins later.
export function at([xs, ys], x) {
  let low = 0,
    high = xs.length - 1;
  if (high < 0 || x < xs[0]) return undefined;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle - 1;
  }
  return { x: xs[low], y: ys[low] };
}
