// The explorer: a spring to play with. One ES module, without a framework or a build step.
//
// Two sections: Numbers (pure functions, no DOM; they equal Python's torchbelay.physics, and tests/explorer holds them to
// it) and Page (the user interface). Under node the file can be imported for its numbers: the page starts only if there
// is a document. In a browser's console the numbers are `explorer.analyze(explorer.DEFAULT)` and so on.
//
// ---- Numbers ---------------------------------------------------------------------------------------------------------
//
// The state is a flat object; DEFAULT has every key:
//   mode        "spring" | "centred" | "lookahead" | "nesterov" | "schedule-free"
//   k, m1, m2   of mode "spring"; m1 may be Infinity (EMA), m2 too
//   damping     of mode "spring": δ = c·Δt/(2m) of both masses, 0 < δ ≤ 1; 1 is velocity-free
//   follow      "before" | "after"; of modes "spring" and "centred"; "after" needs damping = 1
//   theta, c    of mode "centred": θ > −1 and the averaging rate 0 < c < 1 (θ < 0 is GPA)
//   every, alpha  of mode "lookahead": steps in a round (Python's k), and the share of the way
//   mu          of modes "nesterov" (momentum) and "schedule-free" (its β)
//   step        of mode "schedule-free": the step t ≥ 2 whose numbers are shown, with c = 1/t
//   lr, momentum, curvature, noise   the optimizer's rate and its own momentum β; curvature h; noise of a gradient
//   fn, x, y, seed, speed   of the race: name of a function, start, seed of the noise, steps per second (for the page)
//
// With a state:
//   PRESETS                             [{id, label, state: the keys that it sets}]
//   withPreset(state, id)               a new state
//   problem(state)                      null, or the sentence of Python's error; all others need problem(state) === null
//   analyze(state)                      every number at once (see the function for the keys)
//   couplingOf(state, step = 1)         {a, b, p, q}
//   eigenvalues(state, curvature)       [[re, im], …]; of a whole round for Lookahead
//   rootLocus(state, curvatures)        one list of eigenvalues per curvature
//   maxStableLr(state, curvature)       the edge of stability as a learning rate
//   maxStableCurvature(state)           the same edge as a curvature, at state.lr
//   impulseResponse(state, steps)       {w1, w2, weights}: motion after one unit update; weights[j] is the weight in the
//                                       average of what happened j steps ago
//   frequencyResponse(state, omegas)    {w1, w2}: gains |H(ω)| from Σu to weights and average; null for Lookahead
//   noiseCurves(state, count = 80)      {x, sgd, here, ema: […], critical: […]}, points {speed, noise, …}; noise is the
//                                       average's variance over that of plain SGD's weights; null if SGD is not stable
//   explain(state)                      the paragraph of `torchbelay explain`
//   centredOf(state)                    {theta, c} of the state's coupling; null for Lookahead
//   springOf(state)                     a spring's own numbers: kappa1, kappa2, alpha, beta, theta, omega, delta,
//                                       hasVelocity, decay, isStable, halfLife, regime, effectiveLrScale, c1, c2
//   toPython(state)                     a program that runs as it is
//   toHash(state), fromHash(hash)       the state in the address; fromHash accepts anything
//
// With a coupling {a, b, p, q}: rateOf, thetaOf, effectiveLrScaleOf, stableRange(coupling, beta),
//   stationaryVariance(coupling, curvature, lr, noise = 1, momentum = 0) → {w1, w2},
//   convergenceRate(coupling, [least, largest curvature], lr, momentum = 0), polynomial(coupling, x, momentum = 0)
// With numbers: thetaFloor(beta, c, follow = "after"), critical(curvature, lr, rate) → {theta, c}
//
// The race:
//   FUNCTIONS                           [{name, label, formula, value(x, y), gradient(x, y) → [gx, gy], start: [x, y],
//                                       box: [x0, x1, y0, y1], curvature, lr, noise}]; the last is the noisy quadratic
//   functionOf(name)                    one of them; the first if there is no such name
//   raceLanes(state)                    the six lanes [{name, colour, dashed, inner: "SGD" | "Adam", method, lr}]
//   createRace({fn, start, lanes, momentum, noise, seed})   an object with step(), steps, lanes: [{…, w1, w2, loss1, loss2,
//                                       diverged}]; w2 and loss2 are null without an average; diverged is 0 or the step
//
// Golden values: checkGolden(data) → {checked, failures: [text], worst: {quantity: relative difference}}
//
// Text: formatG(x, digits) is Python's format(x, ".{digits}g"), pythonFloat(x) its repr.

const INF = Infinity;

// The state ------------------------------------------------------------------------------------------------------------

export const DEFAULT = Object.freeze({
  mode: "spring", k: 1, m1: 10, m2: 20, damping: 1, follow: "before", theta: -0.5, c: 0.05, every: 6, alpha: 0.5, mu: 0.9,
  step: 100, lr: 0.01, momentum: 0, curvature: 5, noise: 1, fn: "Rosenbrock", x: -0.2, y: 0.3, seed: 1, speed: 30,
});

const MODES = ["spring", "centred", "lookahead", "nesterov", "schedule-free"];
const FOLLOWS = ["before", "after"];

export const PRESETS = Object.freeze([
  { id: "plane", label: "BELAY, plane", state: { mode: "spring", k: 1, m1: 10, m2: 20, damping: 1, follow: "before" } },
  { id: "mnist", label: "BELAY, MNIST", state: { mode: "spring", k: 1, m1: 2000, m2: 500, damping: 1, follow: "before" } },
  { id: "cifar10", label: "BELAY, CIFAR-10", state: { mode: "spring", k: 1, m1: 20000, m2: 2000, damping: 1, follow: "before" } },
  { id: "ema", label: "EMA", state: { mode: "spring", k: 2 * (1 - 0.95), m1: INF, m2: 1, damping: 1, follow: "after" } },
  { id: "lookahead", label: "Lookahead", state: { mode: "lookahead", every: 6, alpha: 0.5 } },
  { id: "nesterov", label: "Nesterov", state: { mode: "nesterov", mu: 0.9 } },
  { id: "schedule-free", label: "schedule-free", state: { mode: "schedule-free", mu: 0.9, step: 100 } },
  { id: "gpa", label: "GPA", state: { mode: "centred", theta: -0.5, c: 0.05, follow: "after" } },
  { id: "critical-spring", label: "critical spring", state: { mode: "spring", k: 1, m1: 2000, m2: 500, follow: "before" } },
  { id: "critical", label: "critical average", state: { mode: "centred", follow: "after" } },
]);

/** Return the state with a preset; the two critical ones are computed from what they are critical for. */
export function withPreset(state, id) {
  const found = PRESETS.find((each) => each.id === id);
  if (!found) return { ...state };
  const next = { ...state, ...found.state };
  if (id === "critical-spring") {
    const omega = Math.sqrt(2 * (next.k / 2 / next.m1 + next.k / 2 / next.m2));
    next.damping = omega - (omega * omega) / 4;
  }
  if (id === "critical") {
    const x = next.curvature * next.lr;
    const { theta, c } = critical(next.curvature, next.lr, Math.min(x, 1) / 4); // a quarter of SGD's own speed
    Object.assign(next, { theta, c });
  }
  return next;
}

/** Return what is wrong with a state, in the words of Python's error; null if nothing is. */
export function problem(state) {
  const s = state;
  if (!MODES.includes(s.mode)) return `mode=${pythonText(s.mode)} is unknown; choose one of ${MODES.map(pythonText).join(", ")}`;
  return problemOfMethod(s) ?? outOfRange("lr", s.lr, 0) ?? outOfRange("momentum", s.momentum, 0, 1, false)
    ?? outOfRange("curvature", s.curvature, 0) ?? outOfRange("noise", s.noise, 0, INF, false);
}

function problemOfMethod(s) {
  switch (s.mode) {
    case "spring": return problemOfSpring(s);
    case "centred": return outOfRange("theta", s.theta, -1) ?? outOfRange("rate", s.c, 0, 1) ?? unknownFollow(s);
    case "lookahead": return notWhole("k", s.every, 1) ?? outOfRange("alpha", s.alpha, 0, 1 + 2 ** -52);
    case "nesterov": return outOfRange("momentum", s.mu, 0, 1, false);
    default: return outOfRange("beta", s.mu, 0, 1, false) ?? notWhole("step", s.step, 2);
  }
}

function problemOfSpring(s) {
  const early = outOfRange("k", s.k, 0) ?? unknownFollow(s);
  if (early) return early;
  for (const index of ["1", "2"]) {
    const name = "m" + index, m = s[name];
    if (!(m > 0)) return `${name}=${pythonFloat(m)} is out of range; it needs ${name} > 0, or inf`;
    const kappa = kappaOf(s.k, m);
    if (kappa >= 1) {
      return `κ${index} = k·dt²/(2·m${index}) = ${formatG(kappa, 4)} with k=${pythonFloat(s.k)}, m${index}=${pythonFloat(m)}, `
        + `dt=1.0 is not below 1: the step would jump past the other mass; use m${index} > ${formatG(kappa * m, 6)} or `
        + `k < ${formatG(2 * m, 6)}`;
    }
  }
  const damping = outOfRange("damping", s.damping, 0, 1, true, false);
  if (damping) return damping;
  if (s.follow === "after" && springOf(s).hasVelocity) {
    return "follow='after' with damping other than the default is not defined: Algorithm 1's velocities follow the weights "
      + "from before the step; use follow='before', or leave c1 and c2 out";
  }
  return null;
}

function outOfRange(name, x, low, high = INF, openLow = true, openHigh = true) {
  if (typeof x !== "number") return `${name}=${pythonText(x)} is not a number; give a float`;
  const above = openLow ? x > low : x >= low;
  if (above && (x < high || (!openHigh && x === high))) return null;
  const bound = `${name} ${openLow ? ">" : "≥"} ${formatG(low, 6)}`
    + (high < INF ? ` and ${name} ${openHigh ? "<" : "≤"} ${formatG(high, 6)}` : ", finite");
  return `${name}=${pythonFloat(x)} is out of range; it needs ${bound}`;
}

function notWhole(name, x, low) {
  if (!Number.isInteger(x)) return `${name}=${pythonText(x)} is not a whole number; give an int of at least ${low}`;
  return x < low ? `${name}=${x} is too small; it needs ${name} ≥ ${low}` : null;
}

function unknownFollow(s) {
  return FOLLOWS.includes(s.follow) ? null : `follow=${pythonText(s.follow)} is unknown; choose one of 'before', 'after'`;
}

// Couplings (physics/coupling.py) --------------------------------------------------------------------------------------

/** Return the four numbers of a step: w1' = w1 + a·(w2 − w1) + p·u, w2' = w2 + b·(w1 − w2) + q·u. */
export function couplingOf(state, step = 1) {
  switch (state.mode) {
    case "spring": {
      const kappa1 = kappaOf(state.k, state.m1), kappa2 = kappaOf(state.k, state.m2);
      return { a: kappa1, b: kappa2, p: 1 - kappa1, q: state.follow === "after" ? kappa2 : 0 };
    }
    case "centred": {
      const { theta, c } = state, b = c / (1 + theta);
      if (state.follow === "before") return { a: theta * b, b, p: 1 + theta, q: 0 };
      return { a: theta * b, b, p: 1 + theta * (1 - c), q: c };
    }
    case "lookahead": {
      const s = state.alpha;
      return step % state.every ? { a: 0, b: 0, p: 1, q: 0 } : { a: 1 - s, b: s, p: s, q: s };
    }
    case "nesterov":
      return { a: -state.mu, b: 1, p: 1 + state.mu, q: 1 };
    default: { // schedule-free at a constant learning rate
      const beta = state.mu, weight = state.lr * state.lr;
      const c = weight / ((step - 1) * weight + weight);
      return { a: (-beta * c) / (1 - beta), b: c / (1 - beta), p: 1 - beta + beta * c, q: c };
    }
  }
}

/** Return the coupling that the analysis is about: that of state.step for schedule-free, of a sync for Lookahead. */
function settled(state) {
  return couplingOf(state, { "schedule-free": state.step, lookahead: state.every }[state.mode] ?? 1);
}

export const rateOf = (coupling) => coupling.a + coupling.b;

export function thetaOf({ a, b }) {
  if (b === 0) return a ? Math.sign(a) * INF : 0;
  return a / b;
}

export function effectiveLrScaleOf({ a, b, p, q }) {
  const drift = b * p + a * q;
  if (a + b === 0) return a === 0 ? p : Math.sign(drift || p) * INF;
  return drift / (a + b);
}

/** Return θ and c of the state's coupling; null for Lookahead, whose steps differ. */
export function centredOf(state) {
  if (state.mode === "lookahead") return null;
  const coupling = settled(state);
  return { theta: thetaOf(coupling), c: rateOf(coupling) };
}

// The spring (physics/spring.py) ---------------------------------------------------------------------------------------

function kappaOf(k, m) {
  return m === INF ? 0 : k / 2 / m;
}

function deltaOf(m, c) {
  const delta = c === null ? 1 : c / (2 * m);
  return isClose(delta, 1, 1e-14) ? 1 : delta;
}

export function springOf(state) {
  const { k, m1, m2 } = state;
  const [c1, c2] = [m1, m2].map((m) => (m === INF || state.damping === 1 ? null : 2 * m * state.damping));
  const kappa1 = kappaOf(k, m1), kappa2 = kappaOf(k, m2);
  const alpha = 1 - kappa1, beta = 1 - kappa2;
  const delta1 = deltaOf(m1, c1), delta2 = deltaOf(m2, c2);
  const hasVelocity = delta1 !== 1 || delta2 !== 1;
  const omega = Math.sqrt(2 * (kappa1 + kappa2));
  const finite = [[m1, delta1], [m2, delta2]].filter(([m]) => m < INF).map(([, delta]) => delta);
  const delta = finite.length && isClose(finite[0], finite[finite.length - 1], 1e-12) ? finite[0] : null;
  const square = omega * omega;
  const found = { k, m1, m2, c1, c2, follow: state.follow, kappa1, kappa2, alpha, beta, delta, hasVelocity, omega };
  found.theta = m1 === INF ? 0 : m2 / m1;
  found.modes = modesOf([kappa1, kappa2], [delta1, delta2], 2 * alpha, m2 === INF);
  if (!hasVelocity) {
    found.relative = [[-kappa1 - kappa2, 0]];
    found.isStable = square > 0 && square < 4;
  } else if (delta === null) {
    found.relative = roots(relativeTerms(found.modes));
    found.isStable = comesToRest(found.modes);
  } else {
    const s = delta + square / 4, root = realSqrt((s - omega) * (s + omega));
    const fast = [-s - root[0], -root[1]];
    found.relative = [fast, divide([square, 0], fast)];
    found.isStable = square > 0 && square < 4 * delta && delta < 1;
  }
  found.decay = Math.max(...found.relative.map(([re, im]) => Math.hypot(1 + re, im)));
  found.halfLife = halfLifeOfSpring(found);
  found.regime = regimeOf(found);
  found.effectiveLrScale = scaleOfSpring(found);
  return found;
}

function halfLifeOfSpring({ decay, relative }) {
  if (decay === 0) return 0;
  // ρ² − 1 = 2·Re ζ + |ζ|² keeps the digits of a slow mode that ρ itself rounds away
  const growth = Math.max(...relative.map(([re, im]) => 2 * re + Math.hypot(re, im) ** 2));
  if (growth >= 0) return INF;
  return Math.log(0.5) / (decay < 0.5 ? Math.log(decay) : Math.log1p(growth) / 2);
}

function regimeOf({ isStable, hasVelocity, delta, omega, relative }) {
  if (!isStable) return "unstable";
  if (!hasVelocity) return "velocity-free";
  if (delta !== null) {
    const excess = delta + (omega * omega) / 4 - omega;
    if (Math.abs(excess) <= 1e-9 * omega) return "critical";
    return excess > 0 ? "overdamped" : "underdamped";
  }
  return relative.some(([re, im]) => Math.abs(im) > 1e-9 * Math.hypot(re, im)) ? "underdamped" : "overdamped";
}

function scaleOfSpring(s) {
  if (!s.hasVelocity) return effectiveLrScaleOf({ a: s.kappa1, b: s.kappa2, p: s.alpha, q: s.follow === "after" ? s.kappa2 : 0 });
  if (s.m1 < INF) {
    const brake = (s.c1 ?? 2 * s.m1) + (s.c2 ?? 2 * s.m2);
    return brake > 0 ? (2 * s.alpha * s.m1) / brake : INF;
  }
  return drift(s.modes);
}

// Modes of a spring with velocities (physics/modes.py): polynomials in ζ = λ − 1, the highest power first ----------------

function modesOf(kappa, delta, scale, anchored) {
  const parts = [0, 1].map((i) => (delta[i] === 1 ? [[1, 0], [kappa[i]]] : [[1, 2 * delta[i], 0], [kappa[i], 2 * kappa[i]]]));
  if (anchored) parts[1] = [[1], [0]]; // w2 has no motion of its own
  const [[a1, b1], [a2, b2]] = parts;
  const alpha = 1 - kappa[0];
  const force = delta[0] === 1 ? [alpha] : [alpha, 2 * alpha * delta[0] + (1 - delta[0]) * scale];
  const second = sum(a2, b2);
  return { p0: sum(times(a1, second), times(a2, b1)), p1: times(force, second), p2: times(force, b2), anchored };
}

function withMomentum(modes, beta) {
  const fresh = 1 - beta;
  return { p0: times(modes.p0, [1, fresh]), p1: times(modes.p1, [fresh, fresh]), anchored: modes.anchored };
}

function relativeTerms({ p0, anchored }) {
  return anchored ? p0 : p0.slice(0, -1);
}

function pushed(modes, push) {
  return sum(modes.p0, modes.p1.map((c) => push * c));
}

function comesToRest(modes, push = 0) {
  const f = push === 0 ? relativeTerms(modes) : pushed(modes, push);
  return hurwitz(opened(f, f.length - 1));
}

function drift({ p0, p1, anchored }) {
  if (anchored) return 0;
  const slope = p0[p0.length - 2];
  return slope === 0 ? INF : p1[p1.length - 1] / slope;
}

/** Return the smallest push = ηh at which a mode of u = −push·w1 leaves the unit circle. */
function firstCrossing(modes) {
  const { p0, p1 } = modes;
  const bottom = valueAt(p1, -2), negligible = 1e-12 * valueAt(p1.map(Math.abs), 2);
  let pushes = Math.abs(bottom) > negligible ? [-valueAt(p0, -2) / bottom] : [];
  const degree = p0.length - 1;
  const [[e0, o0], [e1, o1]] = [p0, p1].map((p) => evenOdd(opened(p, degree)));
  for (const [re, im] of roots(sum(times(e0, o1), times(e1, o0).map((c) => -c)))) {
    if (re > 0 && Math.abs(im) <= 1e-8 * re) {
      const e = valueAt(e1, re), o = valueAt(o1, re);
      if (e || o) pushes.push(-(valueAt(e0, re) * e + re * valueAt(o0, re) * o) / (e * e + re * o * o));
    }
  }
  pushes = pushes.filter((x) => x > 0).sort((x, y) => x - y);
  for (let i = 0; i < pushes.length; i++) {
    const following = i + 1 < pushes.length ? pushes[i + 1] : 2 * pushes[i];
    if (!comesToRest(modes, (pushes[i] + following) / 2)) return pushes[i];
  }
  return INF;
}

function valueAt(coefficients, x) {
  return coefficients.reduce((value, c) => value * x + c, 0);
}

function sum(x, y) {
  const n = Math.max(x.length, y.length), term = (p, i) => (i < p.length ? p[p.length - 1 - i] : 0);
  return Array.from({ length: n }, (_, i) => term(x, n - 1 - i) + term(y, n - 1 - i));
}

function times(x, y) {
  const total = new Array(x.length + y.length - 1).fill(0);
  x.forEach((c, i) => y.forEach((d, j) => { total[i + j] += c * d; }));
  return total;
}

/** Return (1 − σ)ⁿ·f(2σ/(1 − σ)): the unit circle becomes the imaginary axis. */
function opened(coefficients, degree) {
  let total = [], rest = [1];
  for (const c of [...new Array(degree + 1 - coefficients.length).fill(0), ...coefficients]) {
    total = sum([...total.map((x) => 2 * x), 0], rest.map((x) => c * x));
    rest = times(rest, [-1, 1]);
  }
  return total;
}

/** Return E and O of f(iτ) = E(τ²) + iτ·O(τ²). */
function evenOdd(coefficients) {
  const low = [...coefficients].reverse();
  return [0, 1].map((start) => low.filter((_, i) => i % 2 === start).map((c, i) => (i % 2 ? -c : c)).reverse());
}

/** Whether all roots have a negative real part, by Routh's array. */
function hurwitz(coefficients) {
  let above = coefficients.filter((_, i) => i % 2 === 0), below = coefficients.filter((_, i) => i % 2 === 1);
  while (below.length) {
    if (above[0] === 0 || below[0] === 0 || above[0] > 0 !== below[0] > 0) return false;
    const ratio = above[0] / below[0], n = Math.max(above.length, below.length) - 1;
    const next = Array.from({ length: n }, (_, i) => (above[i + 1] ?? 0) - ratio * (below[i + 1] ?? 0));
    [above, below] = [below, next];
  }
  return true;
}

// Complex numbers [re, im], and all roots of a real polynomial (Aberth's iteration) -----------------------------------------

const plus = ([a, b], [c, d]) => [a + c, b + d];
const minus = ([a, b], [c, d]) => [a - c, b - d];
const multiply = ([a, b], [c, d]) => [a * c - b * d, a * d + b * c];

function divide([a, b], [c, d]) {
  if (Math.abs(c) >= Math.abs(d)) {
    const ratio = d / c, bottom = c + d * ratio;
    return [(a + b * ratio) / bottom, (b - a * ratio) / bottom];
  }
  const ratio = c / d, bottom = c * ratio + d;
  return [(a * ratio + b) / bottom, (b * ratio - a) / bottom];
}

/** Return the square root of a real number, which may be negative. */
function realSqrt(x) {
  return x >= 0 ? [Math.sqrt(x), 0] : [0, Math.sqrt(-x)];
}

function horner(coefficients, z) {
  return coefficients.reduce((value, c) => plus(multiply(value, z), [c, 0]), [0, 0]);
}

function roots(coefficients) {
  const largest = Math.max(0, ...coefficients.map(Math.abs));
  const terms = [...coefficients];
  while (terms.length && Math.abs(terms[0]) <= 1e-14 * largest) terms.shift(); // its root is at infinity
  if (terms.length < 2) return [];
  let zeros = 0;
  while (terms[terms.length - 1] === 0) { terms.pop(); zeros++; }
  const monic = terms.map((c) => c / terms[0]), degree = monic.length - 1;
  const slope = monic.slice(0, -1).map((c, i) => c * (degree - i));
  const radius = 2 * Math.max(0, ...monic.slice(1).map((c, i) => Math.abs(c) ** (1 / (i + 1))));
  const found = Array.from({ length: degree }, (_, i) => {
    const angle = (2 * Math.PI * i) / Math.max(1, degree) + 0.4;
    return [radius * Math.cos(angle), radius * Math.sin(angle)];
  });
  for (let round = 0; round < 200; round++) {
    let moved = 0;
    for (let i = 0; i < degree; i++) {
      const z = found[i], bottom = horner(slope, z);
      const ratio = bottom[0] || bottom[1] ? divide(horner(monic, z), bottom) : [0, 0];
      let crowd = [0, 0];
      found.forEach((other, j) => {
        if (j !== i && (z[0] !== other[0] || z[1] !== other[1])) crowd = plus(crowd, divide([1, 0], minus(z, other)));
      });
      const share = minus([1, 0], multiply(ratio, crowd));
      const delta = share[0] || share[1] ? divide(ratio, share) : ratio;
      found[i] = minus(z, delta);
      moved = Math.max(moved, Math.hypot(...delta) / (Math.hypot(...found[i]) || 1));
    }
    if (moved < 1e-15) break;
  }
  const tidy = found.map(([re, im]) => (Math.abs(im) <= 1e-13 * Math.hypot(re, im) ? [re, 0] : [re, im]));
  return [...tidy, ...new Array(zeros).fill([0, 0])];
}

/** Return the roots of λ² + bλ + c, the larger one first by the formula that does not cancel. */
function quadraticRoots(b, c) {
  const square = b * b - 4 * c;
  if (square < 0) return [[-b / 2, Math.sqrt(-square) / 2], [-b / 2, -Math.sqrt(-square) / 2]];
  const far = -(b + (b < 0 ? -1 : 1) * Math.sqrt(square)) / 2;
  return [[far, 0], [far === 0 ? 0 : c / far, 0]];
}

// Stability (physics/inner_momentum.py) and speed (physics/convergence.py) -------------------------------------------------

/** Return the θ below which the stable range collapses, for the optimizer's momentum and the averaging rate. */
export function thetaFloor(beta, c, follow = "after") {
  const share = follow === "before" ? 1 - c : 1;
  return (-share * (1 - beta)) / (1 - beta * (1 - c));
}

/** Return the limit of ηh: SGD with momentum β and this coupling is stable below it. */
export function stableRange(coupling, beta) {
  const { a, b, p, q } = coupling, c = a + b;
  if (!(c >= 0 && c <= 2) || b * p + a * q < 0) return 0;
  const s = p - (b * p + a * q);
  const flip = p + s > 0 ? (2 * (1 + beta) * (2 - c)) / (p + s) : INF;
  const c0 = -beta * (1 - c), free = c * (1 - beta) * (1 - beta * (1 - c));
  return Math.min(flip, firstRoot(free, s + p * c0)) / (1 - beta);
}

/** Return the least x > 0 at which n0 + n1·x falls below 0. */
function firstRoot(n0, n1) {
  if (Math.abs(n1) < 1e-14) n1 = 0; // rounding leaves traces of numbers that are 0
  if (n0 === 0) return n1 < 0 ? 0 : INF;
  return n1 < 0 ? -n0 / n1 : INF;
}

/** Return the coefficients of the characteristic polynomial at x = ηh, the highest power first. */
export function polynomial(coupling, x, momentum = 0) {
  const { a, b, p, q } = coupling, c = a + b, later = p - (b * p + a * q);
  if (!momentum) return [1, -(2 - c - p * x), 1 - c - x * later];
  x *= 1 - momentum;
  return [1, -(2 - c + momentum) + p * x, 1 - c + momentum * (2 - c) - later * x, -momentum * (1 - c)];
}

function radiusOf(coefficients) {
  if (coefficients.length > 3) return Math.max(0, ...roots(coefficients).map((z) => Math.hypot(...z)));
  const [, b, c] = coefficients, square = b * b - 4 * c;
  return square < 0 ? Math.sqrt(c) : (Math.abs(b) + Math.sqrt(square)) / 2;
}

/** Return the factor by which the error shrinks per step on quadratics, for the worse of two curvatures. */
export function convergenceRate(coupling, curvatures, lr, momentum = 0) {
  return Math.max(...curvatures.map((h) => radiusOf(polynomial(coupling, lr * h, momentum))));
}

// Noise (physics/variance.py, physics/matrices.py) and critical damping (physics/critical.py) -------------------------------

/** Return the variances of w1 and w2 in the long run; infinite if the learning rate is not stable. */
export function stationaryVariance(coupling, curvature, lr, noise = 1, momentum = 0) {
  const x = lr * curvature, scale = (lr * noise) ** 2;
  if (x >= stableRange(coupling, momentum)) return { w1: INF, w2: INF };
  const [w1, w2] = momentum ? varianceWithMomentum(coupling, x, momentum) : varianceWithout(coupling, x);
  return { w1: scale * w1, w2: scale * w2 };
}

function varianceWithout({ a, b, p, q }, x) {
  const along = b * p + a * q, trace = 2 - (a + b) - p * x, gap = a + b + x * (p - along);
  const below = gap * x * (2 - gap + trace);
  return [p, q].map((b0) => (x * (b0 * b0 + (along - b0) * (along - b0)) + trace * along) / below);
}

function varianceWithMomentum(coupling, x, beta) {
  const { a, b, p, q } = coupling, { rows, noise } = stepMatrix(coupling, x, beta);
  if ((a === 0 && b === 0) || (b === 0 && q === 0)) { // w2 has no motion of its own
    const left = (m) => [m[0], m[2]].map((row) => [row[0], row[2]]);
    const alone = lyapunov(left(rows), left(noise))[0][0];
    return [alone, p ? alone * (q / p) ** 2 : 0];
  }
  const found = lyapunov(rows, noise);
  return [found[0][0], found[1][1]];
}

/** Return the matrix of a step on (w1, w2, η·m) at ηh = x, and the second moments of its noise if ησ = 1. */
function stepMatrix({ a, b, p, q }, x, beta) {
  if (!beta) return { rows: [[1 - a - p * x, a], [b - q * x, 1 - b]], noise: outer([p, q]) };
  const fresh = 1 - beta;
  const rows = [[1 - a - p * fresh * x, a, -p * beta], [b - q * fresh * x, 1 - b, -q * beta], [fresh * x, 0, beta]];
  return { rows, noise: outer([-p * fresh, -q * fresh, fresh]) };
}

const outer = (v) => v.map((x) => v.map((y) => x * y));
const transposed = (m) => m[0].map((_, j) => m.map((row) => row[j]));
const product = (m, n) => m.map((row) => n[0].map((_, j) => row.reduce((total, x, i) => total + x * n[i][j], 0)));
const total = (m, n) => m.map((row, i) => row.map((x, j) => x + n[i][j]));

function solve(rows, right) {
  const table = rows.map((row, i) => [...row, right[i]]), n = table.length;
  for (let i = 0; i < n; i++) {
    let best = i;
    for (let r = i + 1; r < n; r++) if (Math.abs(table[r][i]) > Math.abs(table[best][i])) best = r;
    [table[i], table[best]] = [table[best], table[i]];
    for (let r = i + 1; r < n; r++) {
      const factor = table[r][i] / table[i][i];
      if (factor) table[r] = table[r].map((x, j) => x - factor * table[i][j]);
    }
  }
  const x = new Array(n).fill(0);
  for (let i = n - 1; i >= 0; i--) {
    let known = 0;
    for (let j = i + 1; j < n; j++) known += table[i][j] * x[j];
    x[i] = (table[i][n] - known) / table[i][i];
  }
  return x;
}

/** Return the symmetric S with S = M·S·Mᵀ + Q. */
function lyapunov(m, q) {
  const n = m.length, pairs = [];
  for (let i = 0; i < n; i++) for (let j = i; j < n; j++) pairs.push([i, j]);
  const rows = pairs.map(([i, j]) => pairs.map(([k, o]) => {
    const x = k === o ? m[i][k] * m[j][k] : m[i][k] * m[j][o] + m[i][o] * m[j][k];
    return (i === k && j === o ? 1 : 0) - x;
  }));
  const found = solve(rows, pairs.map(([i, j]) => q[i][j]));
  const at = (i, j) => found[pairs.findIndex(([k, o]) => k === Math.min(i, j) && o === Math.max(i, j))];
  return m.map((_, i) => m.map((__, j) => at(i, j)));
}

/** Return θ and c whose two modes both shrink by 1 − rate per step; NaN if no θ > −1 does. */
export function critical(curvature, lr, rate) {
  const x = curvature * lr;
  if (!(rate > 0 && rate < 1 && rate < (2 * x) / (1 + x))) return { theta: NaN, c: NaN };
  const c = (rate * rate) / x;
  return { theta: (2 * rate - rate * rate - c) / ((1 - c) * x) - 1, c };
}

// What the page shows of a state ---------------------------------------------------------------------------------------------

function hasVelocity(state) {
  return state.mode === "spring" && springOf(state).hasVelocity;
}

/** Return the modes under u = −x·w1 of a spring with velocities, as λ. */
function velocityModes(state, x) {
  const modes = springOf(state).modes;
  const moved = state.momentum ? withMomentum(modes, state.momentum) : modes;
  return roots(pushed(moved, x)).map(([re, im]) => [1 + re, im]);
}

/** Return a round of Lookahead, which ends in w1 = w2, on the states (w, η·m), and the noise that it adds. */
function roundMatrix(state, x) {
  let rows = null, noise = null;
  for (let step = 1; step <= state.every; step++) {
    const one = stepMatrix(couplingOf(state, step), x, state.momentum);
    noise = noise ? total(product(product(one.rows, noise), transposed(one.rows)), one.noise) : one.noise;
    rows = rows ? product(one.rows, rows) : one.rows;
  }
  const kept = rows.length === 2 ? [0] : [0, 2];
  return {
    rows: kept.map((i) => kept.map((j) => (j ? rows[i][j] : rows[i][0] + rows[i][1]))),
    noise: kept.map((i) => kept.map((j) => noise[i][j])),
  };
}

function roundIsStable(rows) {
  if (rows.length === 1) return Math.abs(rows[0][0]) < 1;
  const trace = rows[0][0] + rows[1][1], determinant = rows[0][0] * rows[1][1] - rows[0][1] * rows[1][0];
  return determinant < 1 && Math.abs(trace) < 1 + determinant;
}

/** Return the eigenvalues of a step at a curvature, as [re, im]; for Lookahead those of a round. */
export function eigenvalues(state, curvature) {
  const x = state.lr * curvature;
  if (state.mode === "lookahead") {
    const { rows } = roundMatrix(state, x);
    if (rows.length === 1) return [[rows[0][0], 0]];
    return quadraticRoots(-(rows[0][0] + rows[1][1]), rows[0][0] * rows[1][1] - rows[0][1] * rows[1][0]);
  }
  if (hasVelocity(state)) return velocityModes(state, x);
  const terms = polynomial(settled(state), x, state.momentum);
  return terms.length === 3 ? quadraticRoots(terms[1], terms[2]) : roots(terms);
}

export function rootLocus(state, curvatures) {
  return curvatures.map((h) => eigenvalues(state, h));
}

/** Return the factor by which the error shrinks per step at a curvature, in the long run. */
function radius(state, curvature) {
  if (state.mode === "lookahead" || hasVelocity(state)) {
    const largest = Math.max(...eigenvalues(state, curvature).map((z) => Math.hypot(...z)));
    return state.mode === "lookahead" ? largest ** (1 / state.every) : largest;
  }
  return convergenceRate(settled(state), [curvature], state.lr, state.momentum);
}

/** Return the limit of ηh below which the state is stable. */
function rangeOf(state) {
  if (state.mode === "lookahead") return rangeOfRounds(state);
  if (hasVelocity(state)) {
    const spring = springOf(state);
    return spring.isStable ? firstCrossing(withMomentum(spring.modes, state.momentum)) : 0;
  }
  return stableRange(settled(state), state.momentum);
}

/** Return the first x at which a round grows: found on a grid, then by bisection. */
function rangeOfRounds(state) {
  const widest = ((4 / state.alpha) * (1 + state.momentum)) / (1 - state.momentum), count = 600;
  const stable = (x) => roundIsStable(roundMatrix(state, x).rows);
  for (let i = 1; i <= count; i++) {
    let low = (widest * (i - 1)) / count, high = (widest * i) / count;
    if (stable(high)) continue;
    for (let halving = 0; halving < 60; halving++) {
      const middle = (low + high) / 2;
      if (stable(middle)) low = middle; else high = middle;
    }
    return low;
  }
  return INF;
}

export function maxStableLr(state, curvature) {
  return rangeOf(state) / curvature;
}

export function maxStableCurvature(state) {
  return rangeOf(state) / state.lr;
}

/** Return the variances of w1 and w2 in the long run at the state's own numbers; for Lookahead after a sync. */
function variancesOf(state, range = rangeOf(state)) {
  const x = state.lr * state.curvature;
  if (state.mode !== "lookahead" && !hasVelocity(state)) {
    return stationaryVariance(settled(state), state.curvature, state.lr, state.noise, state.momentum);
  }
  if (x >= range) return { w1: INF, w2: INF };
  const scale = (state.lr * state.noise) ** 2;
  if (state.mode === "lookahead") {
    const { rows, noise } = roundMatrix(state, x), w = scale * lyapunov(rows, noise)[0][0];
    return { w1: w, w2: w };
  }
  const { rows, kick } = velocityMatrix(state, x), found = lyapunov(rows, outer(kick));
  return { w1: scale * found[0][0], w2: scale * found[1][1] };
}

/** Return the matrix of a step on (w1, w2, v1, v2, η·m), without what the spring does not keep, and where noise enters. */
function velocityMatrix(state, x) {
  const mover = moverOf(state, 1), beta = state.momentum;
  const names = ["w1", "w2", ...(mover.inertia1 ? ["v1"] : []), ...(mover.inertia2 ? ["v2"] : []), ...(beta ? ["m"] : [])];
  const move = (from, gradient) => { // the gradient in units of 1/η
    const m = beta * (from.m ?? 0) + (1 - beta) * gradient;
    const to = { w1: from.w1, w2: from.w2, v1: from.v1 ?? 0, v2: from.v2 ?? 0, m };
    moveOne(to, mover, -m);
    return names.map((name) => to[name]);
  };
  const rest = { w1: 0, w2: 0 };
  return {
    rows: transposed(names.map((name) => move({ ...rest, [name]: 1 }, name === "w1" ? x : 0))),
    kick: move(rest, 1),
  };
}

/** Return every number of a state:
 * coupling {a, b, p, q}, theta, rate, hasVelocity, regime, decay, halfLife (steps), effectiveLrScale, effectiveLr,
 * range (limit of lr·curvature), maxStableLr (at state.curvature), maxStableLrOfSgd (the same for SGD with the same
 * momentum), maxStableCurvature (at state.lr), isStable (at state.lr and state.curvature), thetaFloor, eigenvalues, radius,
 * variance {w1, w2}, speed (1 − radius), noise (variance of w2 over that of plain SGD's weights), explanation.
 * What a method does not have is null: theta, rate, decay, halfLife of Lookahead, thetaFloor of springs with velocities.
 */
export function analyze(state) {
  const { lr, curvature, momentum } = state, x = lr * curvature;
  const coupling = settled(state), rounds = state.mode === "lookahead";
  const spring = state.mode === "spring" ? springOf(state) : null;
  const rate = rateOf(coupling), range = rangeOf(state), reach = radius(state, curvature), variance = variancesOf(state, range);
  const scale = rounds ? state.alpha : spring ? spring.effectiveLrScale : effectiveLrScaleOf(coupling);
  const floor = !rounds && !spring?.hasVelocity && rate > 0 && rate <= 1;
  return {
    coupling,
    theta: rounds ? null : spring ? spring.theta : thetaOf(coupling),
    rate: rounds ? null : rate,
    hasVelocity: spring?.hasVelocity ?? false,
    regime: spring ? spring.regime : "velocity-free",
    decay: rounds ? null : spring ? spring.decay : Math.abs(1 - rate),
    halfLife: rounds ? null : spring ? spring.halfLife : halfLifeOf(rate),
    effectiveLrScale: scale,
    effectiveLr: scale * lr,
    range,
    maxStableLr: range / curvature,
    maxStableLrOfSgd: (2 * (1 + momentum)) / (1 - momentum) / curvature,
    maxStableCurvature: range / lr,
    isStable: x < range,
    thetaFloor: floor ? thetaFloor(momentum, rate, coupling.q ? "after" : "before") : null,
    eigenvalues: eigenvalues(state, curvature),
    radius: reach,
    variance,
    speed: 1 - reach,
    noise: relativeNoise(state, variance),
    explanation: explain(state),
  };
}

function halfLifeOf(rate) {
  const left = Math.abs(1 - rate);
  if (left === 0) return 0;
  if (left >= 1) return INF;
  return Math.log(0.5) / (rate < 1 ? Math.log1p(-rate) : Math.log(left));
}

/** Return the average's variance over that of the weights of SGD without momentum and without an average. */
function relativeNoise(state, { w2 }) {
  return w2 === INF ? INF : w2 / stationaryVariance(WATCHED, state.curvature, state.lr, state.noise).w1;
}

const WATCHED = Object.freeze({ a: 0, b: 0.5, p: 1, q: 0.5 }); // an EMA, whose weights are those of SGD alone

/** Return the curves of theorem 3 and the state's own point; null if plain SGD is not stable. */
export function noiseCurves(state, count = 80) {
  const x = state.lr * state.curvature;
  if (!(x < 2 && state.noise > 0)) return null;
  const plain = stationaryVariance(WATCHED, 1, x).w1;
  const point = (theta, c) => {
    const coupling = couplingOf({ mode: "centred", theta, c, follow: "after" });
    return { theta, c, speed: 1 - convergenceRate(coupling, [1], x), noise: stationaryVariance(coupling, 1, x).w2 / plain };
  };
  const fastest = Math.min(x, (2 * x) / (1 + x) / (1 + 1e-12)); // of theorem 3: up to the speed of SGD itself
  const shares = Array.from({ length: count }, (_, i) => 10 ** (-3 + (3 * i) / Math.max(1, count - 1)));
  const speeds = shares.map((share) => fastest * share).filter((mu) => mu < 1);
  const own = { speed: 1 - radius(state, state.curvature), noise: relativeNoise(state, variancesOf(state)) };
  return {
    x,
    sgd: { speed: 1 - Math.abs(1 - x), noise: 1 },
    here: own,
    ema: speeds.map((mu) => point(0, mu)),
    critical: speeds.map((mu) => critical(1, x, mu)).filter(({ theta }) => theta > -1).map(({ theta, c }) => point(theta, c)),
  };
}

/** Return the motion of w1 and w2 after one unit update at rest, and the weights of the past in the average. */
export function impulseResponse(state, steps) {
  const first = state.mode === "schedule-free" ? state.step : 1;
  const at = { w1: 0, w2: 0, v1: 0, v2: 0 }, w1 = [], w2 = [];
  for (let i = 0; i < steps; i++) {
    moveOne(at, moverOf(state, first + i), i === 0 ? 1 : 0);
    w1.push(at.w1);
    w2.push(at.w2);
  }
  return { w1, w2, weights: w2.map((value, i) => (i ? value - w2[i - 1] : value)) };
}

/** Return the gains from the sum of all updates to weights and average at these frequencies (radians per step). */
export function frequencyResponse(state, omegas) {
  if (state.mode === "lookahead") return null;
  const w1 = [], w2 = [], velocity = hasVelocity(state);
  for (const omega of omegas) {
    const half = Math.sin(omega / 2), zeta = [-2 * half * half, Math.sin(omega)]; // exp(iω) − 1
    let first, second;
    if (velocity) {
      const { p0, p1, p2, anchored } = springOf(state).modes;
      const rest = horner(anchored ? p0 : p0.slice(0, -1), zeta), extra = anchored ? zeta : [1, 0];
      [first, second] = [p1, p2].map((p) => divide(multiply(horner(p, zeta), extra), rest));
    } else {
      const { a, b, p, q } = settled(state), rest = plus(zeta, [a + b, 0]);
      [first, second] = [p, q].map((gain) => divide(plus(multiply([gain, 0], zeta), [b * p + a * q, 0]), rest));
    }
    w1.push(Math.hypot(...first));
    w2.push(Math.hypot(...second));
  }
  return { w1, w2 };
}

// Words (physics/explain.py) -----------------------------------------------------------------------------------------------

/** Return a paragraph about a state: that of `torchbelay explain`, or the first line of a method's own description. */
export function explain(state) {
  const beta = state.momentum;
  switch (state.mode) {
    case "spring": {
      const spring = springOf(state);
      const said = [kindOf(spring), memoryOf(spring), ...learningRateOf(state, spring), adviceOf(spring)];
      if (beta && spring.hasVelocity) {
        const limit = rangeOf(state), alone = (2 * (1 + beta)) / (1 - beta);
        said.push(`Around an optimizer with momentum β1 = ${formatG(beta)} it is stable below ηh = ${formatG(limit, 4)}, against ${formatG(alone, 4)} with an EMA.`);
      } else if (beta) {
        said.push(explainMomentum(couplingOf(state), beta));
      }
      return said.join(" ");
    }
    case "centred":
      return joined(explainCentred(state.theta, state.c, couplingOf(state)), couplingOf(state), beta);
    case "schedule-free":
      return joined(explainCentred(-state.mu, 1 / state.step, settled(state)), settled(state), beta);
    case "nesterov":
      return joined("Nesterov's momentum μ: w2 is w1* of the step before, and the spring repels.", settled(state), beta);
    default:
      return "Lookahead: every `k` steps the slow weights w2 move by `alpha` of the way to w1, and w1 restarts from them.";
  }
}

function joined(text, coupling, beta) {
  return beta ? `${text} ${explainMomentum(coupling, beta)}` : text;
}

function explainCentred(theta, c, coupling) {
  let kind = "An ordinary average (EMA): gradients are taken at";
  if (theta < 0) kind = "A spring that repels (Generalized Primal Averaging): gradients are taken between the average and";
  if (theta > 0) kind = "A spring that attracts, as BELAY's: gradients are taken further from the average than";
  return `${kind} the trajectory that it averages (θ = ${formatG(theta)}). It forgets half of the distance in `
    + `${stepsText(Math.log(0.5) / Math.log1p(-c))}. The learning rate is what the optimizer says. SGD on curvature h is stable below `
    + `ηh = ${formatG(stableRange(coupling, 0), 4)}, against 2 for plain SGD or EMA.`;
}

function explainMomentum(coupling, beta) {
  const scale = effectiveLrScaleOf(coupling), c = rateOf(coupling), theta = thetaOf(coupling);
  const alone = (2 * (1 + beta)) / (1 - beta), limit = stableRange(coupling, beta) * scale;
  const effective = isClose(scale, 1, 1e-9) ? "" : " in the effective rate";
  const against = theta ? `, against ${formatG(alone, 4)} with an EMA` : ", as without an average";
  const said = [`Around an optimizer with momentum β1 = ${formatG(beta)} it is stable below ηh = ${formatG(limit, 4)}${effective}${against}.`];
  if (!(c > 0 && c <= 1)) return said[0];
  const floor = thetaFloor(beta, c, coupling.q ? "after" : "before");
  const at = `At this averaging rate the floor of θ is ${formatG(floor, 3)}`, own = formatG(theta, 3);
  if (theta >= 0) {
    said.push(`${at}: a spring that repels more than that would lose its stable range. This one does not repel.`);
  } else if (theta < floor) {
    said.push(`${at}, and θ = ${own} is below it: two momenta feed each other, and the stable range collapses. Give the optimizer β1 = 0, or the spring a θ nearer to 0.`);
  } else if (theta < 0.75 * floor) {
    said.push(`${at}. θ = ${own} is above it, but within a quarter of it: the pair is poorly damped.`);
  } else {
    said.push(`${at}, and θ = ${own} keeps clear of it.`);
  }
  if (theta && limit > 1) {
    const ema = { a: 0, b: c, p: 1, q: c }, pairs = [[coupling, 1 / scale], [ema, 1]];
    const speed = pairs.map(([one, lr]) => 1 - convergenceRate(one, [1, 1], lr, beta));
    const noise = pairs.map(([one, lr]) => stationaryVariance(one, 1, lr, 1, beta).w2);
    said.push(`At ηh = 1${effective} its errors shrink by ${formatG(speed[0], 2)} of themselves per step (EMA of the same rate: `
      + `${formatG(speed[1], 2)}), and its average has ${formatG(noise[0] / noise[1], 2)} times the variance of that EMA.`);
  }
  return said.join(" ");
}

function kindOf(s) {
  if (s.omega === 0) return "Two infinite masses: the spring moves neither of them.";
  if (s.m1 === INF) {
    const passive = "it watches the weights and never pulls them.";
    if (s.hasVelocity) return `An average with a velocity of its own (${s.regime}, decay ${formatG(s.decay)} in the long run): ${passive}`;
    if (s.follow === "after") return `An ordinary average (EMA with decay ${formatG(s.beta)}): ${passive}`;
    return `An average one step behind (EMA with decay ${formatG(s.beta)}, Algorithm 1 with m1 = inf): ${passive}`;
  }
  if (s.m2 === INF) return `A tether: the average never moves and pulls the weights back by ${formatG(s.kappa1, 4)} of their way each step.`;
  const pulls = `each step the average pulls the weights back by κ1 = ${formatG(s.kappa1, 4)} of the distance and follows them by κ2 = ${formatG(s.kappa2, 4)} of it`;
  if (s.hasVelocity) return `BELAY with velocities (${s.regime}): ${pulls}.`;
  return `BELAY, velocity-free: ${pulls} (α = ${formatG(s.alpha)}, β = ${formatG(s.beta)}).`;
}

function memoryOf(s) {
  if (s.omega === 0) return "So the average stays what it was at the start.";
  if (!s.isStable) return "It never forgets: its free motion does not come to rest.";
  if (s.halfLife < 1) return "It remembers less than one step.";
  return `It forgets half of the distance in ${stepsText(s.halfLife)} and 99% in ${stepsText(s.halfLife * Math.log2(100))}.`;
}

function learningRateOf(state, s) {
  if (s.m1 === INF) return ["The learning rate is what the optimizer says, and so is the stable range of SGD: ηh < 2 at curvature h."];
  if (!s.isStable) return ["No learning rate of SGD is stable with it."];
  if (s.m2 === INF) return ["A constant update moves the weights only so far from where the average stands."];
  const scale = s.effectiveLrScale, limit = rangeOf({ ...state, momentum: 0 });
  const said = [
    `In the long run the pair moves at ${formatG(scale, 4)} of the optimizer's learning rate.`,
    `SGD on curvature h is stable below ηh = ${formatG(limit, 4)}, which is ${formatG(limit * scale, 4)} in that effective rate, against 2 for plain SGD or EMA.`,
  ];
  const rate = s.hasVelocity ? 1 - s.decay : s.kappa1 + s.kappa2;
  if (!(rate > 0 && rate < 1)) return [...said, "No EMA matches it."];
  const rest = s.hasVelocity ? "the pull, and the velocities," : "the pull itself";
  return [...said, `Compare it with its matched EMA: decay ${formatG(Math.abs(1 - rate))}, follow='${s.follow}', at ${formatG(scale, 4)} of the `
    + `learning rate; what remains between the two is ${rest} (θ = m2/m1 = ${formatG(s.theta, 4)}).`];
}

function adviceOf(s) {
  if (s.omega === 0) return "Give one of them a finite mass.";
  if (!s.isStable) return "Leave c1 and c2 out, or change the damping, before training with it.";
  if (s.m1 === INF) return "For a longer memory raise the decay or lower k; to let the average steady the model make m1 finite.";
  if (s.m2 === INF) return "For less pull raise m1; to let the average follow give m2 a finite value.";
  return `For a longer memory lower k; for less pull raise m1 (m1 = inf is EMA); to train at the rate you are used to, multiply the optimizer's by ${formatG(1 / s.effectiveLrScale, 4)}.`;
}

function stepsText(count) {
  if (count >= 100 && count < 1e15) {
    const { digits, exponent } = rounded(count, 1 + Math.floor(Math.log10(count)) + 4); // enough digits to round again
    const whole = halfEven(digits, exponent + 1);
    return `${whole.replace(/\B(?=(\d{3})+$)/g, ",")} steps`;
  }
  return `${formatG(count, 3)} steps`;
}

// Numbers as Python writes them ----------------------------------------------------------------------------------------------

/** Return Python's format(x, ".{precision}g"). */
export function formatG(x, precision = 6) {
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "nan" : x > 0 ? "inf" : "-inf";
  if (x === 0) return Object.is(x, -0) ? "-0" : "0";
  const sign = x < 0 ? "-" : "", { digits, exponent } = rounded(Math.abs(x), precision);
  return sign + placed(digits.replace(/0+$/, ""), exponent, exponent < -4 || exponent >= precision);
}

/** Return Python's repr of a float. */
export function pythonFloat(x) {
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "nan" : x > 0 ? "inf" : "-inf";
  const [mantissa, power] = Math.abs(x).toExponential().split("e"), exponent = Number(power); // the shortest that reads back
  const sign = x < 0 || Object.is(x, -0) ? "-" : "", far = exponent < -4 || exponent >= 16;
  const text = placed(mantissa.replace(".", ""), exponent, far);
  return sign + (far || text.includes(".") ? text : text + ".0");
}

function pythonText(value) {
  return typeof value === "string" ? `'${value}'` : typeof value === "number" ? pythonFloat(value) : String(value);
}

/** Return digits with a decimal point, or with an exponent of at least two digits. */
function placed(digits, exponent, far) {
  if (far) {
    const rest = digits.length > 1 ? "." + digits.slice(1) : "";
    return `${digits[0]}${rest}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`;
  }
  if (exponent < 0) return "0." + "0".repeat(-exponent - 1) + digits;
  const whole = digits.padEnd(exponent + 1, "0");
  return whole.length > exponent + 1 ? `${whole.slice(0, exponent + 1)}.${whole.slice(exponent + 1)}` : whole;
}

/** Return the digits of x > 0 rounded to a precision, ties to even as in Python, and the exponent of the first. */
function rounded(x, precision) {
  const [mantissa, power] = x.toExponential(60).split("e");
  let digits = halfEven(mantissa.replace(".", ""), precision), exponent = Number(power);
  if (digits.length > precision) { digits = digits.slice(0, -1); exponent++; }
  return { digits, exponent };
}

/** Return the first `count` digits, rounded; one more if it carries. */
function halfEven(digits, count) {
  const kept = digits.slice(0, count).padEnd(count, "0"), rest = digits.slice(count);
  const half = "5".padEnd(rest.length, "0");
  if (rest === "" || rest < half || (rest === half && Number(kept[count - 1]) % 2 === 0)) return kept;
  return String(BigInt(kept) + 1n).padStart(count, "0");
}

function isClose(x, y, tolerance) {
  return x === y || Math.abs(x - y) <= tolerance * Math.max(Math.abs(x), Math.abs(y));
}

// Taking it home -------------------------------------------------------------------------------------------------------------

function pythonNumber(x) {
  return x === INF ? 'float("inf")' : pythonFloat(x);
}

function pythonMethod(state) {
  switch (state.mode) {
    case "spring": {
      const s = springOf(state);
      if (s.m1 === INF && s.m2 === 1 && s.follow === "after" && 2 * (1 - s.beta) === s.k) return `tb.Spring.ema(decay=${pythonFloat(s.beta)})`;
      const given = [["k", s.k], ["m1", s.m1], ["m2", s.m2], ["c1", s.c1], ["c2", s.c2]].filter(([, value]) => value !== null);
      const shown = given.map(([name, value]) => `${name}=${pythonNumber(value)}`);
      if (s.follow === "after") shown.push('follow="after"');
      if (!s.isStable) shown.push("allow_unstable=True");
      return `tb.Spring(${shown.join(", ")})`;
    }
    case "centred":
      return `tb.methods.centred(theta=${pythonFloat(state.theta)}, rate=${pythonFloat(state.c)}${state.follow === "before" ? ', follow="before"' : ""})`;
    case "lookahead": return `tb.methods.lookahead(k=${state.every}, alpha=${pythonFloat(state.alpha)})`;
    case "nesterov": return `tb.methods.nesterov(${pythonFloat(state.mu)})`;
    default: return `tb.methods.schedule_free(beta=${pythonFloat(state.mu)})`;
  }
}

/** Return a Python program with this setting; it runs as it is. */
export function toPython(state) {
  const beta = pythonFloat(state.momentum), inner = state.momentum ? `, momentum=${beta}, dampening=${beta}` : "";
  return `import torch
import torchbelay as tb

model = torch.nn.Linear(10, 1)  # your model
optimizer = torch.optim.SGD(model.parameters(), lr=${pythonFloat(state.lr)}${inner})
method = ${pythonMethod(state)}
belay = tb.Belay(model, optimizer, method)

for _ in range(10):  # your training loop
    loss = model(torch.randn(32, 10)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

with belay.averaged():  # the model has the average's weights here
    print(model(torch.ones(1, 10)))
`;
}

// Each key of the address, and the values that it may have.
const between = (low, high) => (text) => {
  const value = text === "inf" ? INF : Number(text);
  return text.trim() !== "" && value >= low && value <= high ? value : undefined;
};
const whole = (low, high) => (text) => {
  const value = between(low, high)(text);
  return Number.isInteger(value) ? value : undefined;
};
const among = (choices) => (text) => (choices.includes(text) ? text : undefined);
const KEYS = {
  mode: among(MODES), k: between(1e-9, 1e9), m1: between(1e-9, INF), m2: between(1e-9, INF), damping: between(1e-6, 1),
  follow: among(FOLLOWS), theta: between(-1 + 1e-9, 1e6), c: between(1e-9, 1 - 1e-9), every: whole(1, 1000), alpha: between(1e-6, 1),
  mu: between(0, 1 - 1e-9), step: whole(2, 1e9), lr: between(1e-12, 1e6), momentum: between(0, 1 - 1e-6), curvature: between(1e-9, 1e9),
  noise: between(0, 1e6), fn: (text) => (FUNCTIONS.some(({ name }) => name === text) ? text : undefined), x: between(-1e3, 1e3),
  y: between(-1e3, 1e3), seed: whole(0, 2 ** 32 - 1), speed: between(1, 1e4),
};

/** Return the part of the address after #: what differs from DEFAULT; "" if nothing does. */
export function toHash(state) {
  const changed = Object.keys(KEYS).filter((key) => state[key] !== DEFAULT[key] && state[key] !== undefined);
  const pairs = changed.map((key) => `${key}=${encodeURIComponent(state[key] === INF ? "inf" : String(state[key]))}`);
  return pairs.length ? "#" + pairs.join("&") : "";
}

/** Return the state of an address; what it does not say, or says wrongly, is as in DEFAULT. */
export function fromHash(hash) {
  const state = { ...DEFAULT };
  for (const pair of String(hash ?? "").replace(/^#/, "").split("&")) {
    const [key, ...rest] = pair.split("=");
    if (!Object.hasOwn(KEYS, key)) continue;
    let text;
    try { text = decodeURIComponent(rest.join("=")); } catch { continue; } // a broken % sequence
    const value = KEYS[key](text);
    if (value !== undefined) state[key] = value;
  }
  if (state.mode === "spring" && state.damping < 1) state.follow = "before"; // what Python demands of velocities
  return state;
}

// The race (lab/plane) -------------------------------------------------------------------------------------------------------

const BELAY_COLOUR = "#D55E00", EMA_COLOUR = "#0072B2", PLAIN_COLOUR = "#555555"; // of the report
const FAR = 1e6; // a run has diverged if a weight is this far from the minimum

function beale(x, y) {
  const u = x + 3, v = y + 0.5, v2 = v * v, v3 = v2 * v;
  return [u, v, v2, v3, 1.5 - u + u * v, 2.25 - u + u * v2, 2.625 - u + u * v3];
}

export const FUNCTIONS = Object.freeze([
  {
    name: "Rosenbrock", label: "Rosenbrock", formula: "x² + 100·(x − y²)²", curvature: 202, start: [-0.2, 0.3],
    box: [-0.45, 0.45, -0.6, 0.6], lr: 0.004, noise: 0,
    value: (x, y) => x * x + 100 * (x - y * y) ** 2,
    gradient: (x, y) => [2 * x + 200 * (x - y * y), -400 * y * (x - y * y)],
  },
  {
    name: "Beale", label: "Beale", formula: "Σ (cᵢ − X + X·Yⁱ)², X = x + 3, Y = y + ½", curvature: 48.97978635347775,
    start: [-0.8, -0.8], box: [-1.3, 1.3, -1.3, 1.3], lr: 0.01, noise: 0,
    value: (x, y) => {
      const [, , , , r1, r2, r3] = beale(x, y);
      return r1 * r1 + r2 * r2 + r3 * r3;
    },
    gradient: (x, y) => {
      const [u, v, v2, v3, r1, r2, r3] = beale(x, y);
      return [2 * (r1 * (v - 1) + r2 * (v2 - 1) + r3 * (v3 - 1)), 2 * u * (r1 + 2 * r2 * v + 3 * r3 * v2)];
    },
  },
  {
    name: "absolute", label: "absolute values", formula: "|x|/10 + |y|", curvature: null, start: [-0.8, 0.7],
    box: [-1.1, 1.1, -1.1, 1.1], lr: 0.01, noise: 0,
    value: (x, y) => Math.abs(x) / 10 + Math.abs(y),
    gradient: (x, y) => [Math.sign(x) / 10, Math.sign(y)],
  },
  {
    name: "bowl", label: "bowl", formula: "((x + y/10)² + (x − y/10)²)/10", curvature: 0.4, start: [-0.8, 0.7],
    box: [-1.1, 1.1, -1.1, 1.1], lr: 0.1, noise: 0,
    value: (x, y) => ((x + y / 10) ** 2 + (x - y / 10) ** 2) / 10,
    gradient: (x, y) => [0.4 * x, 0.004 * y],
  },
  {
    name: "quadratic", label: "noisy quadratic", formula: "(4·x² + y²)/2, with noisy gradients", curvature: 4, start: [-1, 1],
    box: [-1.5, 1.5, -1.5, 1.5], lr: 0.05, noise: 1,
    value: (x, y) => (4 * x * x + y * y) / 2,
    gradient: (x, y) => [4 * x, y],
  },
]);

export function functionOf(name) {
  return FUNCTIONS.find((each) => each.name === name) ?? FUNCTIONS[0];
}

const PAPER_EMA = { ...DEFAULT, mode: "spring", k: 2 * (1 - 0.95), m1: INF, m2: 1, damping: 1, follow: "after" };

/** Return the six lanes of the report, with the state's method in BELAY's place; all at the state's learning rate. */
export function raceLanes(state) {
  const own = state.mode === "spring" && state.m1 < INF ? "BELAY" : "this setting";
  const kinds = [[own, BELAY_COLOUR, state], ["EMA", EMA_COLOUR, PAPER_EMA], [null, PLAIN_COLOUR, null]];
  return kinds.flatMap(([label, colour, method]) => ["Adam", "SGD"].map((inner) => ({
    name: label ? `${label}+${inner}` : inner, colour, dashed: inner === "Adam", inner, method, lr: state.lr,
  })));
}

/** Return random numbers in [0, 1) (Marsaglia's xorshift on 32 bits); the same seed gives the same numbers. */
function randomNumbers(seed) {
  let bits = ((seed >>> 0) ^ 0x9e3779b9) >>> 0 || 1;
  const next = () => {
    bits ^= bits << 13;
    bits ^= bits >>> 17;
    bits ^= bits << 5;
    return (bits >>> 0) / 2 ** 32;
  };
  for (let i = 0; i < 8; i++) next(); // similar seeds begin alike
  return next;
}

/** Return a pair of independent normal numbers. */
function normalPair(next) {
  const size = Math.sqrt(-2 * Math.log(1 - next())), angle = 2 * Math.PI * next();
  return [size * Math.cos(angle), size * Math.sin(angle)];
}

/** Return what one step does to w1, w2 and their velocities: the coupling, and the inertia of each mass or null. */
function moverOf(state, step) {
  const coupling = couplingOf(state, step);
  if (state.mode !== "spring") return { coupling, inertia1: null, inertia2: null };
  const s = springOf(state), kept = (m, c) => {
    const delta = deltaOf(m, c);
    return delta === 1 ? null : { carry: 1 - delta, stay: 1 - 2 * delta, pull: s.k / m };
  };
  const inertia1 = kept(s.m1, s.c1), inertia2 = kept(s.m2, s.c2);
  if (inertia1) inertia1.push = 2 * s.alpha;
  if (inertia2) inertia2.push = 0;
  return { coupling, inertia1, inertia2 };
}

/** Move {w1, w2, v1, v2} by one step with the update u. */
function moveOne(at, { coupling: { a, b, p, q }, inertia1, inertia2 }, u) {
  const { w1, w2, v1, v2 } = at;
  at.w1 = w1 + a * (w2 - w1) + p * u;
  at.w2 = w2 + b * (w1 - w2) + q * u;
  if (inertia1) {
    at.w1 += inertia1.carry * v1;
    at.v1 = inertia1.stay * v1 + inertia1.pull * (w2 - w1) + inertia1.push * u;
  }
  if (inertia2) {
    at.w2 += inertia2.carry * v2;
    at.v2 = inertia2.stay * v2 + inertia2.pull * (w1 - w2) + inertia2.push * u;
  }
}

/** Return the update of torch's SGD (with as much dampening as momentum) or Adam, coordinate by coordinate. */
function innerOptimizer(kind, lr, momentum) {
  const beta1 = kind === "Adam" ? (momentum ?? 0.9) : (momentum ?? 0), beta2 = 0.999, eps = 1e-8;
  const mean = [0, 0], square = [0, 0];
  let count = 0, power1 = 1, power2 = 1;
  return (gradient) => {
    count++;
    if (kind !== "Adam") {
      return gradient.map((g, i) => {
        mean[i] = count === 1 ? g : beta1 * mean[i] + (1 - beta1) * g; // torch's first step has no dampening
        return -lr * mean[i];
      });
    }
    power1 *= beta1;
    power2 *= beta2;
    return gradient.map((g, i) => {
      mean[i] += (1 - beta1) * (g - mean[i]);
      square[i] = beta2 * square[i] + (1 - beta2) * g * g;
      return (-lr / (1 - power1)) * (mean[i] / (Math.sqrt(square[i]) / Math.sqrt(1 - power2) + eps));
    });
  };
}

/** Return a race: all lanes start at one point and see the same noise. `momentum` is SGD's; Adam keeps its β1 = 0.9. */
export function createRace({ fn, start, lanes, momentum = 0, noise, seed = 1 }) {
  const loss = typeof fn === "string" ? functionOf(fn) : fn, random = randomNumbers(seed);
  const sigma = noise ?? loss.noise, from = start ?? loss.start;
  const runs = lanes.map((lane) => {
    const update = innerOptimizer(lane.inner, lane.lr, lane.inner === "Adam" ? undefined : momentum);
    const fixed = lane.method && !["lookahead", "schedule-free"].includes(lane.method.mode) ? moverOf(lane.method, 1) : null;
    const at = from.map((w) => ({ w1: w, w2: w, v1: 0, v2: 0 }));
    const value = loss.value(...from);
    return { ...lane, update, fixed, at, w1: [...from], w2: lane.method ? [...from] : null, loss1: value, loss2: lane.method ? value : null, diverged: 0 };
  });
  const race = { fn: loss, steps: 0, lanes: runs };
  race.step = () => {
    race.steps++;
    const kick = sigma ? normalPair(random).map((z) => sigma * z) : [0, 0];
    for (const run of runs) {
      if (run.diverged) continue;
      const gradient = loss.gradient(run.w1[0], run.w1[1]);
      const u = run.update([gradient[0] + kick[0], gradient[1] + kick[1]]);
      const mover = run.fixed ?? (run.method ? moverOf({ ...run.method, lr: run.lr }, race.steps) : null);
      for (let i = 0; i < 2; i++) {
        const at = run.at[i];
        if (mover) moveOne(at, mover, u[i]); else at.w1 += u[i];
        run.w1[i] = at.w1;
        if (run.w2) run.w2[i] = at.w2;
      }
      run.loss1 = loss.value(run.w1[0], run.w1[1]);
      if (run.w2) run.loss2 = loss.value(run.w2[0], run.w2[1]);
      if (!(Math.abs(run.w1[0]) < FAR && Math.abs(run.w1[1]) < FAR)) run.diverged = race.steps;
    }
  };
  return race;
}

// Golden values: this file against Python (tests/helpers/explorer_golden.py makes the data) -----------------------------------

const LINEAR = 1e-12, PATH = 1e-9, STABLE_STEPS = 50;
const SCALARS = ["theta", "rate", "decay", "halfLife", "effectiveLrScale", "effectiveLr", "range", "maxStableLr", "maxStableLrOfSgd",
  "maxStableCurvature", "thetaFloor"];
const SAME = ["regime", "hasVelocity", "isStable", "explanation"];

/** Compare with golden values; return how many were compared, what differs, and the largest relative difference of each. */
export function checkGolden(data) {
  const report = { checked: 0, failures: [], worst: {} };
  const note = (what, where, difference, tolerance, text) => {
    report.checked++;
    if (!(difference <= (report.worst[what] ?? 0))) report.worst[what] = difference;
    if (!(difference <= tolerance)) report.failures.push(`${what} of ${where}: ${text} (${difference} > ${tolerance})`);
  };
  const number = (what, where, got, right, tolerance = LINEAR, size = Math.abs(read(right))) => {
    const want = read(right);
    const difference = got === want ? 0 : Math.abs(got - want) / (size || 1);
    note(what, where, difference, tolerance, `${got}, and Python has ${want}`);
  };
  const same = (what, where, got, right) => note(what, where, got === right ? 0 : 1, 0, `${got}, and Python has ${right}`);
  const series = (what, where, got, right, tolerance) => {
    same(`${what}: length`, where, got.length, right.length);
    const size = Math.max(...right.map((x) => Math.abs(read(x))));
    right.forEach((value, i) => number(what, where, got[i], value, tolerance, size));
  };
  for (const key of Object.keys(data.default)) same("default", key, DEFAULT[key], read(data.default[key]));
  const next = randomNumbers(5);
  data.normal.forEach((pair, i) => series("noise of the race", `pair ${i}`, normalPair(next), pair, LINEAR));
  data.settings.forEach((right, i) => checkSetting(stateOf(right.state), right, data, `setting ${i}`, { number, same, series }));
  data.races.forEach((right, i) => checkRace(right, `race ${i} on ${right.fn}`, { number, same }));
  return report;
}

/** Return a golden number: JSON has no infinity. */
function read(value) {
  return value === "inf" ? INF : value;
}

function stateOf(golden) {
  return { ...DEFAULT, ...Object.fromEntries(Object.entries(golden).map(([key, value]) => [key, read(value)])) };
}

function checkSetting(state, right, data, where, { number, same, series }) {
  same("problem", where, problem(state), null);
  same("address", where, JSON.stringify(fromHash(toHash(state))), JSON.stringify(state));
  const found = analyze(state);
  ["a", "b", "p", "q"].forEach((name, i) => number(name, where, found.coupling[name], right.coupling[i]));
  for (const name of SCALARS) {
    if (right[name] === null || found[name] === null) same(name, where, found[name], right[name]);
    else number(name, where, found[name], right[name]);
  }
  for (const name of SAME) same(name, where, found[name], right[name]);
  const spread = checkEigenvalues(found.eigenvalues, right.eigenvalues, where, { number, same });
  number("radius", where, found.radius, right.radius, spread);
  number("speed", where, found.speed, right.speed, spread, Math.max(1, Math.abs(right.radius)));
  // Python has no formula for the noise of velocities and of rounds. An equation gives it, which slow modes make less exact.
  const ours = found.hasVelocity || state.mode === "lookahead";
  const tolerance = ours ? LINEAR / Math.max(1e-6, Math.min(1, found.speed)) : LINEAR;
  number("variance of w1", where, found.variance.w1, right.variance[0], tolerance);
  number("variance of w2", where, found.variance.w2, right.variance[1], tolerance);
  number("noise", where, found.noise, right.noise, tolerance);
  const { w1, w2, weights } = impulseResponse(state, right.impulse[0].length);
  series("impulse of w1", where, w1, right.impulse[0]);
  series("impulse of w2", where, w2, right.impulse[1]);
  series("weights of the past", where, weights, right.impulse[1].map((x, i) => x - (i ? right.impulse[1][i - 1] : 0)));
  const gains = frequencyResponse(state, data.omegas);
  if (right.gains === null || gains === null) same("gains", where, gains, right.gains);
  else [gains.w1, gains.w2].forEach((gain, i) => gain.forEach((value, j) => number(`gain of w${i + 1}`, where, value, right.gains[i][j])));
  const curves = noiseCurves(state, data.curve);
  if (right.curves === null || curves === null) return same("curves", where, curves, right.curves);
  for (const name of ["ema", "critical"]) {
    same("curves: length", where, curves[name].length, right.curves[name].length);
    curves[name].forEach(({ theta, c, speed, noise }, i) => {
      const [theta0, c0, speed0, noise0] = right.curves[name][i];
      number("curve: θ", where, theta, theta0, LINEAR, 1);
      number("curve: c", where, c, c0);
      number("curve: speed", where, speed, speed0, name === "critical" ? 1e-7 : LINEAR, 1); // a double root has half of the digits
      number("curve: noise", where, noise, noise0);
    });
  }
}

/** Compare two sets of eigenvalues; return the tolerance of the largest. Roots that nearly meet are known less exactly. */
function checkEigenvalues(found, right, where, { number, same }) {
  same("eigenvalues: number", where, found.length, right.length);
  const left = [...found], largest = Math.max(...right.map((z) => Math.hypot(...z)));
  let widest = LINEAR;
  for (const z of right) {
    const nearest = left.reduce((best, w, i) => (Math.hypot(...minus(w, z)) < Math.hypot(...minus(left[best], z)) ? i : best), 0);
    const crowd = right.filter((w) => w !== z).reduce((product, w) => {
      const apart = Math.hypot(...minus(w, z));
      return product * (apart ? (Math.hypot(...w) + Math.hypot(...z)) / apart : 1e9);
    }, 1);
    const tolerance = Math.max(LINEAR, Math.min(1e-7, 1e-14 * crowd));
    if (Math.hypot(...z) > 0.999 * largest) widest = Math.max(widest, tolerance);
    const [[re, im]] = left.splice(nearest, 1);
    number("eigenvalues", where, Math.hypot(re - z[0], im - z[1]), 0, tolerance, Math.max(Math.hypot(...z), 1e-3 * largest));
  }
  return widest;
}

/** Compare paths: all of them over the first steps, up to where one leaves the neighbourhood of the minimum. */
function checkRace(right, where, { number, same }) {
  const lanes = right.lanes.map((lane) => ({ ...lane, method: lane.method && stateOf(lane.method) }));
  const race = createRace({ ...right, lanes });
  same("lanes", where, race.lanes.length, right.lanes.length);
  let kept = 0;
  for (let step = 0; step <= right.at[right.at.length - 1]; step++) {
    if (step) race.step();
    if (right.at[kept] !== step) continue;
    race.lanes.forEach((run, i) => {
      const golden = right.lanes[i], far = golden.w1.slice(0, kept + 1).some((w) => !(Math.hypot(...w) < 10));
      if (far || (step > STABLE_STEPS && right.fn !== "bowl" && right.fn !== "quadratic")) return;
      for (const name of golden.w2 ? ["w1", "w2"] : ["w1"]) {
        const size = Math.max(1e-3, Math.hypot(...golden[name][kept]));
        [0, 1].forEach((j) => number("path", `${where}, lane ${i}, step ${step}, ${name}`, run[name][j], golden[name][kept][j], PATH, size));
      }
    });
    kept++;
  }
}

if (typeof document !== "undefined") {
  globalThis.explorer = { DEFAULT, PRESETS, FUNCTIONS, withPreset, problem, analyze, explain, toPython, toHash, fromHash, createRace, raceLanes, checkGolden };
}

// ---- Page --------------------------------------------------------------------------------------------------------------
