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
//   theta, c    of mode "centred": θ ≥ −1 + 1e-8 and the averaging rate 0 < c < 1 (θ < 0 is GPA)
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
const NEAREST = -1 + 1e-8; // the least θ: nearer to −1, rounding would destroy the numbers of the coupling

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
    case "centred": return outOfRange("theta", s.theta, -1) ?? tooNear(s) ?? outOfRange("rate", s.c, 0, 1) ?? unknownFollow(s);
    case "lookahead": return notWhole("k", s.every, 1) ?? outOfRange("alpha", s.alpha, 0, 1, true, false);
    case "nesterov": return outOfRange("momentum", s.mu, 0, 1, false);
    default: return outOfRange("beta", s.mu, 0, 1, false) ?? notWhole("step", s.step, 2);
  }
}

/** Return what is wrong with a θ that is too near to −1; null if it is not. */
function tooNear(s) {
  if (s.theta >= NEAREST) return null;
  return `theta=${pythonFloat(s.theta)} is too near to -1: rounding would destroy the numbers of the coupling; use a theta of at `
    + "least -0.99999999";
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
  for (let round = 0, before = INF; round < 200; round++) {
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
    if (moved < 1e-15 || (moved < 1e-12 && moved >= before)) break; // from here on rounding alone moves them
    before = moved;
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

/** Return the θ above which no complex pair grows, for the optimizer's momentum and the averaging rate. */
export function thetaFloor(beta, c, follow = "after") {
  const share = follow === "before" ? 1 - c : 1;
  return (-share * (1 - beta)) / (1 - beta + beta * c);
}

/** Return the limit of ηh: SGD with momentum β and this coupling is stable below it. */
export function stableRange(coupling, beta) {
  const { a, b, p, q } = coupling, c = a + b;
  if (!(c >= 0 && c <= 2) || b * p + a * q < 0) return 0;
  const { flip, turn } = limitsOf(coupling, beta);
  return Math.min(flip, turn) / (1 - beta);
}

/** Whether the floor binds: a complex pair ends a repelling spring's range before a root through −1 does. */
function isBelowFloor(coupling, beta) {
  const { flip, turn } = limitsOf(coupling, beta);
  return thetaOf(coupling) < 0 && turn < flip;
}

/** Return the x = (1−β)ηh at which a root leaves the circle through −1, and that at which a complex pair leaves it. */
function limitsOf({ a, b, p, q }, beta) {
  const c = a + b, s = p - (b * p + a * q);
  const flip = p + s > 0 ? (2 * (1 + beta) * (2 - c)) / (p + s) : INF;
  const c0 = -beta * (1 - c), free = c * (1 - beta) * (1 - beta * (1 - c));
  return { flip, turn: firstRoot(free, s + p * c0) };
}

/** Return the least x > 0 at which n0 + n1·x falls below 0. */
function firstRoot(n0, n1) {
  if (Math.abs(n1) < 1e-14) n1 = 0; // rounding leaves traces of numbers that are 0
  if (n0 === 0) return n1 < 0 ? 0 : INF;
  return n1 < 0 ? -n0 / n1 : INF;
}

/** Return the coefficients of the characteristic polynomial at x = ηh in ζ = λ − 1, the highest power first. */
export function polynomial(coupling, x, momentum = 0) {
  const { a, b, p, q } = coupling, c = a + b, along = b * p + a * q, fresh = 1 - momentum;
  if (!momentum) return [1, c + p * x, along * x];
  return [1, fresh + c + fresh * p * x, fresh * (c + (p + along) * x), fresh * along * x];
}

/** Return the eigenvalues λ = 1 + ζ of a step from its polynomial in ζ. */
function eigenvaluesOf(terms) {
  if (terms.length === 3) return quadraticRoots(terms[1], terms[2]).map(([re, im]) => [1 + re, im]);
  const unit = Math.max(1, ...terms.slice(1).map((c, i) => Math.abs(c) ** (1 / (i + 1)))); // of ζ: it stays monic
  return roots(terms.map((c, i) => c / unit ** i)).map(([re, im]) => [1 + unit * re, unit * im]);
}

/** Return the factor by which the error shrinks per step on quadratics, for the worse of two curvatures. */
export function convergenceRate(coupling, curvatures, lr, momentum = 0) {
  const found = curvatures.flatMap((h) => eigenvaluesOf(polynomial(coupling, lr * h, momentum)));
  return Math.max(...found.map((z) => Math.hypot(...z)));
}

// Noise (physics/variance.py, physics/matrices.py) and critical damping (physics/critical.py) -------------------------------

/** Return the variances of w1 and w2 in the long run; infinite if the learning rate is not stable. */
export function stationaryVariance(coupling, curvature, lr, noise = 1, momentum = 0) {
  const x = lr * curvature, root = noise * (Math.sqrt(lr) / Math.sqrt(curvature)); // s/√x
  if (x >= stableRange(coupling, momentum)) return { w1: INF, w2: INF };
  const [w1, w2] = varianceShares(coupling, x, momentum);
  return { w1: scaled(root * root, w1), w2: scaled(root * root, w2) };
}

/** Return a variance in units of (ησ)²; infinite if rounding leaves nothing of the distance from the edge of stability. */
function scaled(scale, variance) {
  if (scale === 0) return 0;
  return Number.isNaN(variance) ? INF : scale * variance;
}

/** Return x·Var/s² of w1 and w2; infinite if rounding puts x on the limit. */
function varianceShares({ a, b, p, q }, x, beta) {
  const c = a + b, fresh = 1 - beta, along = b * p + a * q, g = fresh + beta * c, over = 2 * p - along;
  const turn = c * g + x * (g * p - along), flip = 2 * (1 + beta) * (2 - c) - fresh * over * x;
  if (turn <= 0 || flip <= 0) return [INF, INF];
  return [p, q].map((b0) => {
    const b1 = along - b0;
    const kicks = fresh * (b0 - b1) ** 2 * (2 * c + over * x) + 2 * flip * (b0 * b0 + b1 * b1);
    return (fresh * x * kicks + along * flip * (4 * g - fresh * along * x)) / (8 * turn * flip);
  });
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
  const keeps = (m) => m !== INF && state.damping !== 1 && deltaOf(m, 2 * m * state.damping) !== 1;
  return state.mode === "spring" && (keeps(state.m1) || keeps(state.m2));
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
  return { rows: afterSync(rows), noise: kept.map((i) => kept.map((j) => noise[i][j])) };
}

/** Return the matrix of a round alone, by squaring: the search for its limit needs many. */
function roundRows(state, x) {
  const sync = stepMatrix(couplingOf(state, state.every), x, state.momentum).rows;
  let power = stepMatrix({ a: 0, b: 0, p: 1, q: 0 }, x, state.momentum).rows, rows = sync;
  for (let left = state.every - 1; left > 0; left >>= 1) {
    if (left & 1) rows = product(rows, power); // powers of one matrix may change places
    if (left > 1) power = product(power, power);
  }
  return afterSync(rows);
}

/** Return a matrix on (w1, w2, η·m) as one on (w, η·m), for rounds that begin and end in w1 = w2 = w. */
function afterSync(rows) {
  const kept = rows.length === 2 ? [0] : [0, 2];
  return kept.map((i) => kept.map((j) => (j ? rows[i][j] : rows[i][0] + rows[i][1])));
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
    const rows = roundRows(state, x);
    if (!rows.flat().every((value) => Math.abs(value) < 1e150)) return [[INF, 0]]; // far beyond the edge a round overflows
    if (rows.length === 1) return [[rows[0][0], 0]];
    return quadraticRoots(-(rows[0][0] + rows[1][1]), rows[0][0] * rows[1][1] - rows[0][1] * rows[1][0]);
  }
  if (hasVelocity(state)) return velocityModes(state, x);
  return eigenvaluesOf(polynomial(settled(state), x, state.momentum));
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
  const stable = (x) => roundIsStable(roundRows(state, x));
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
    const { rows, noise } = roundMatrix(state, x), w = scaled(scale, lyapunov(rows, noise)[0][0]);
    return { w1: w, w2: w };
  }
  const { rows, kick } = velocityMatrix(state, x), found = lyapunov(rows, outer(kick));
  return { w1: scaled(scale, found[0][0]), w2: state.m2 === INF ? 0 : scaled(scale, found[1][1]) };
}

/** Return the matrix of a step on (w1, w2, v1, v2, η·m), without what the spring does not keep, and where noise enters. */
function velocityMatrix(state, x) {
  const mover = moverOf(state, 1), beta = state.momentum;
  const names = ["w1", ...(state.m2 < INF ? ["w2"] : []), ...(mover.inertia1 ? ["v1"] : []), ...(mover.inertia2 ? ["v2"] : []), ...(beta ? ["m"] : [])];
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
  if (state.noise === 0) return relativeNoise({ ...state, noise: 1 }, variancesOf({ ...state, noise: 1 })); // the ratio stays
  return w2 === INF ? INF : w2 / stationaryVariance(WATCHED, state.curvature, state.lr, state.noise).w1;
}

const WATCHED = Object.freeze({ a: 0, b: 0.5, p: 1, q: 0.5 }); // an EMA, whose weights are those of SGD alone

/** Return the curves of theorem 3 and the state's own point; null if plain SGD is not stable. */
export function noiseCurves(state, count = 80) {
  const x = state.lr * state.curvature;
  if (!(x < 2)) return null;
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
  const fixed = ["lookahead", "schedule-free"].includes(state.mode) ? null : moverOf(state, first); // the same at every step
  for (let i = 0; i < steps; i++) {
    moveOne(at, fixed ?? moverOf(state, first + i), i === 0 ? 1 : 0);
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
        said.push(explainStableRange(rangeOf(state), spring.effectiveLrScale, spring.theta, beta));
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
  if (theta < 0) kind = "A spring that repels (Generalized Primal Averaging, of which schedule-free is the case c = 1/t): gradients are taken between the average and";
  if (theta > 0) kind = "A spring that attracts, as BELAY's: gradients are taken further from the average than";
  return `${kind} the trajectory that it averages (θ = ${formatG(theta)}). It forgets half of the distance in `
    + `${stepsText(Math.log(0.5) / Math.log1p(-c))}. The learning rate is what the optimizer says. SGD on curvature h is stable below `
    + `ηh = ${formatG(stableRange(coupling, 0), 4)}, against 2 for plain SGD or EMA.`;
}

function explainStableRange(limit, scale, theta, beta) {
  const around = `Around an optimizer with momentum β1 = ${formatG(beta)}`;
  if (limit === 0) return `${around} no learning rate is stable with it.`;
  const scaled = scale !== 0 && !isClose(scale, 1, 1e-9); // a tether has no effective rate
  const against = theta ? `, against ${formatG((2 * (1 + beta)) / (1 - beta), 4)} with an EMA` : ", as without an average";
  return `${around} it is stable below ηh = ${formatG(scaled ? limit * scale : limit, 4)}${scaled ? " in the effective rate" : ""}${against}.`;
}

/** Return what a θ below the floor does to the stable range, of which `limit` is the end in the effective rate. */
function belowFloor(coupling, beta, limit) {
  const feed = "two momenta feed each other";
  if (!isBelowFloor(coupling, beta)) {
    return `${feed} from a finite learning rate on. That rate is above the stable range, so that the floor does not bind.`;
  }
  if (limit >= (2 * (1 + beta)) / (1 - beta)) return `${feed}, and that ends the stable range. It is still no smaller than an EMA's.`;
  return `${feed}, and the stable range collapses. Give the optimizer β1 = 0, or the spring a θ nearer to 0.`;
}

function explainMomentum(coupling, beta) {
  const scale = effectiveLrScaleOf(coupling), c = rateOf(coupling), theta = thetaOf(coupling);
  const nominal = stableRange(coupling, beta), said = [explainStableRange(nominal, scale, theta, beta)];
  if (!(c > 0 && c <= 1) || coupling.b === 0) return said[0]; // with b = 0 the average stands still, and θ is infinite
  const limit = nominal * scale, effective = isClose(scale, 1, 1e-9) ? "" : " in the effective rate";
  const floor = thetaFloor(beta, c, coupling.q ? "after" : "before");
  const at = `At this averaging rate the floor of θ is ${formatG(floor, 3)}`, own = formatG(theta, 3);
  if (theta >= 0) {
    said.push(`${at}: below it, a spring that repels and this momentum feed each other. This one does not repel.`);
  } else if (theta < floor) {
    said.push(`${at}, and θ = ${own} is below it: ${belowFloor(coupling, beta, limit)}`);
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
  if (s.m1 === INF && s.follow === "after") return "For a longer memory raise the decay."; // an EMA, which most give by its decay
  if (s.m1 === INF) return "For a longer memory lower k, which raises the decay; to let the average pull the weights make m1 finite.";
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
  follow: among(FOLLOWS), theta: between(NEAREST, 1e6), c: between(1e-9, 1 - 1e-9), every: whole(1, 100), alpha: between(1e-6, 1),
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
// Everything below draws and listens. It holds no formula: numbers come from the functions above, colours from the
// style sheet. Figures are SVG, so that text stays text and handles can have the focus. What moves at every frame of
// the race is drawn on canvases, piece by piece.

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const mix = (a, b, share) => a + (b - a) * share;

// Words and numbers ------------------------------------------------------------------------------------------------

/** Return a number as text of about `digits` digits, with a real minus sign. */
function show(value, digits = 3) {
  if (Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) {
    const [mantissa, power] = value.toExponential(Math.max(0, digits - 2)).split("e");
    return `${mantissa.replace(/\.0+$/, "")}e${power.replace("+", "")}`.replaceAll("-", "−");
  }
  const text = size >= 1000 && digits > 2 ? Math.round(value).toString() : Number(value.toPrecision(digits)).toString();
  return text.replace("-", "−");
}

/** Return the number of a text that a person typed, or NaN. */
function readNumber(text) {
  const plain = text.trim().replaceAll("−", "-").replace(",", ".");
  if (/^[+]?(inf|infinity|∞)$/i.test(plain)) return Infinity;
  return plain === "" ? NaN : Number(plain);
}

const steps = (count) => `${show(count)} ${show(count) === "1" ? "step" : "steps"}`;

// Sizes: measured once, and again after a change of the window. A measurement in every frame would cost more than the
// rest of the frame.

let sizes = new WeakMap();

function sizeOf(element) {
  if (!sizes.has(element)) {
    const { width, height } = element.getBoundingClientRect();
    sizes.set(element, { width, height });
  }
  return sizes.get(element);
}

// Drawing: scales, axes, curves ------------------------------------------------------------------------------------

/** Return an SVG element with attributes, appended to its parent. */
function draw(name, attributes, parent) {
  const node = document.createElementNS(SVG, name);
  setAttributes(node, attributes);
  parent?.append(node);
  return node;
}

function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else node.setAttribute(name, value);
  }
}

/** Return a function from a domain to pixels, with its inverse; both logarithmic if asked. */
function makeScale([low, high], [start, end], log = false) {
  const into = log ? Math.log : (value) => value;
  const back = log ? Math.exp : (value) => value;
  const [from, to] = [into(low), into(high)];
  const scale = (value) => start + ((into(value) - from) / (to - from)) * (end - start);
  scale.invert = (pixel) => back(from + ((pixel - start) / (end - start)) * (to - from));
  scale.domain = [low, high];
  scale.log = log;
  return scale;
}

/** Return round numbers inside a domain, at most about `count` of them. */
function roundTicks([low, high], count, log) {
  if (log) return logTicks(low, high, count);
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found.map((value) => Number(value.toPrecision(12)));
}

function logTicks(low, high, count) {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const stride = Math.max(1, Math.ceil((last - first + 1) / count));
  const found = [];
  for (let power = first; power <= last; power += stride) found.push(10 ** power);
  if (found.length >= 3) return found;
  const finer = [1, 2, 5].flatMap((each) => [first - 1, ...found.map(Math.log10), last].map((p) => each * 10 ** p));
  return [...new Set(finer)].filter((value) => value >= low * 0.999 && value <= high * 1.001).sort((a, b) => a - b);
}

/** Return the text of a tick: powers of ten as such, since a long row of zeros cannot be read. */
function tickText(value, log) {
  if (!log || (value > 0.00999 && value < 9999)) return show(value);
  const power = Math.round(Math.log10(value));
  const digits = [...String(power)].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])).join("");
  return Math.abs(value / 10 ** power - 1) < 1e-6 ? `10${digits}` : show(value);
}

/** Return a plot on an SVG: scales, and axes that are drawn anew only if they changed. */
function makePlot(svg, { x, y, margin = [26, 12, 34, 46] }) {
  const { width, height } = sizeOf(svg);
  const [top, right, bottom, left] = margin;
  const plot = {
    svg,
    width,
    height,
    x: makeScale(x.domain, [left, Math.max(left + 1, width - right)], x.log),
    y: makeScale(y.domain, [Math.max(top + 1, height - bottom), top], y.log),
  };
  const key = JSON.stringify([width, height, x, y]);
  if (svg.dataset.key !== key) {
    svg.dataset.key = key;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    layer(svg, "axes").replaceChildren();
    drawAxes(plot, x, y, [left, width - right, top, height - bottom]);
  }
  return plot;
}

function drawAxes(plot, x, y, [left, right, top, bottom]) {
  const axes = layer(plot.svg, "axes");
  const across = x.ticks ?? roundTicks(x.domain, Math.max(2, (right - left) / 64), x.log);
  const up = y.ticks ?? roundTicks(y.domain, Math.max(2, (bottom - top) / 42), y.log);
  for (const [i, value] of across.entries()) {
    const at = plot.x(value);
    draw("path", { class: "grid", d: `M${at} ${top}V${bottom}` }, axes);
    draw(
      "text",
      { x: at, y: bottom + 15, "text-anchor": "middle", text: x.names?.[i] ?? tickText(value, x.log) },
      axes,
    );
  }
  for (const value of up) {
    const at = plot.y(value);
    draw("path", { class: "grid", d: `M${left} ${at}H${right}` }, axes);
    draw("text", { x: left - 6, y: at + 4, "text-anchor": "end", text: tickText(value, y.log) }, axes);
  }
  draw("path", { class: "axis", d: `M${left} ${top}V${bottom}H${right}` }, axes);
  if (x.label) draw("text", { x: (left + right) / 2, y: bottom + 31, "text-anchor": "middle", text: x.label }, axes);
  if (y.label) draw("text", { x: 4, y: top - 14, text: y.label }, axes);
}

/** Return the group of that name in an SVG, made at first use: groups lie above each other in the order of use. */
function layer(svg, name) {
  return svg.querySelector(`:scope > g[data-layer="${name}"]`) ?? draw("g", { "data-layer": name }, svg);
}

/** Return the element of that name in a plot, made at first use, with new attributes. */
function mark(plot, name, kind, attributes, where = "marks") {
  const parent = layer(plot.svg, where);
  const node = parent.querySelector(`:scope > [data-name="${name}"]`) ?? draw(kind, { "data-name": name }, parent);
  setAttributes(node, attributes);
  return node;
}

/** Return the path through points [x, y] of a plot; a point that is not finite interrupts it. */
function pathOf(plot, points) {
  let path = "";
  let pen = "M";
  for (const [x, y] of points) {
    const [across, up] = [plot.x(x), plot.y(y)];
    if (!Number.isFinite(across) || !Number.isFinite(up)) {
      pen = "M";
      continue;
    }
    path += `${pen}${across.toFixed(1)} ${clamp(up, -1e4, 1e4).toFixed(1)}`;
    pen = "L";
  }
  return path;
}

/** Draw a curve by name, clipped to the frame of its plot. */
function curve(plot, name, points, { colour, width = 2, dash = "", opacity = 1 }) {
  const clip = clipOf(plot);
  const style = `stroke:${colour};stroke-width:${width};stroke-dasharray:${dash || "none"};opacity:${opacity}`;
  return mark(plot, name, "path", { class: "curve", d: pathOf(plot, points), style, "clip-path": clip }, "curves");
}

function clipOf(plot) {
  const id = `${plot.svg.id}-clip`;
  if (!byId(id)) draw("rect", {}, draw("clipPath", { id }, draw("defs", {}, plot.svg)));
  const [left, right] = plot.x.domain.map(plot.x);
  const [bottom, top] = plot.y.domain.map(plot.y);
  setAttributes(byId(id).firstChild, { x: left, y: top, width: right - left, height: bottom - top });
  return `url(#${id})`;
}

// Frames -----------------------------------------------------------------------------------------------------------

const stillness = typeof matchMedia === "function" ? matchMedia("(prefers-reduced-motion: reduce)") : null;

/** Return a function that calls `work` once soon, however often it is called itself. */
function once(work) {
  let waiting = false;
  const run = () => {
    waiting = false;
    work();
  };
  return () => {
    if (waiting) return;
    waiting = true;
    // Readers who ask for stillness get no frames at all: a change is drawn at the end of its own event.
    if (stillness.matches) queueMicrotask(run);
    else requestAnimationFrame(run);
  };
}

/** Return an animation that calls `advance(seconds)` per frame until it returns false; it never runs in stillness. */
function makeMotion(advance) {
  const motion = { running: false, start, stop };
  let last = 0;
  let ticket = 0;
  function frame(now) {
    const seconds = Math.min(0.1, (now - last) / 1000); // after a pause in the background, not one great leap
    last = now;
    if (advance(seconds)) ticket = requestAnimationFrame(frame);
    else motion.running = false;
  }
  function start() {
    if (motion.running || stillness.matches) return;
    motion.running = true;
    last = performance.now();
    ticket = requestAnimationFrame(frame);
  }
  function stop() {
    motion.running = false;
    cancelAnimationFrame(ticket);
  }
  return motion;
}

/** Return a canvas's context in CSS pixels, with its size; the bitmap follows the screen's pixels. */
function fitCanvas(canvas) {
  const { width, height } = sizeOf(canvas);
  const ratio = Math.min(3, devicePixelRatio || 1);
  const size = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { context, width, height };
}

/** Return the colours of the style sheet as they are now, light or dark: a canvas cannot read variables. */
function readColours(names) {
  const probe = document.createElement("span");
  document.body.append(probe);
  const found = {};
  for (const name of names) {
    probe.style.color = `var(--${name})`;
    found[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return found;
}
const COLOURS = ["paper", "raised", "ink", "quiet", "line", "faint", "control", "belay", "ema", "plain", "coil", "bad"];
let colours = {};

// Handles ----------------------------------------------------------------------------------------------------------

/** Let an element be dragged: `move(x, y)` gets pixels relative to `frame`.
 *
 * A large element has a small `hand` in it. A mouse may begin anywhere; a finger drags the hand only, or taps: with a
 * drag from anywhere else it scrolls the page.
 */
function makeDraggable(element, frame, { move, end = () => {}, hand = null }) {
  const place = (event) => {
    const box = frame.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const scrolls = (event) => event.pointerType === "touch" && hand && !byId(hand).contains(event.target);
  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || scrolls(event)) return;
    event.preventDefault(); // no selection of text
    element.setPointerCapture(event.pointerId);
    (hand ? byId(hand) : element).focus({ preventScroll: true });
    move(...place(event));
  });
  // Instead of the style touch-action, which browsers ignore on some shapes inside an SVG.
  const still = (event) => (!hand || byId(hand).contains(event.target)) && event.preventDefault();
  element.addEventListener("touchstart", still, { passive: false });
  if (hand) element.addEventListener("click", (event) => move(...place(event)));
  element.addEventListener("pointermove", (event) => {
    if (element.hasPointerCapture(event.pointerId)) move(...place(event));
  });
  for (const name of ["pointerup", "pointercancel"]) {
    element.addEventListener(name, (event) => {
      if (!element.hasPointerCapture(event.pointerId)) return;
      element.releasePointerCapture(event.pointerId);
      end();
    });
  }
}

const ARROWS = {
  ArrowLeft: [-1, 0],
  ArrowRight: [1, 0],
  ArrowDown: [0, -1],
  ArrowUp: [0, 1],
  PageDown: [0, -10],
  PageUp: [0, 10],
};

/** Let arrow keys move a handle: `move(across, up)` gets whole steps, ten with Shift; Home and End call `ends`. */
function makeKeyable(element, move, ends) {
  element.addEventListener("keydown", (event) => {
    const times = event.shiftKey ? 10 : 1;
    if (ARROWS[event.key]) move(...ARROWS[event.key].map((each) => each * times));
    else if (ends && event.key === "Home") ends(0);
    else if (ends && event.key === "End") ends(1);
    else return;
    event.preventDefault();
  });
}

/** Tell a handle's value to those who do not see it. */
function setSlider(element, { now, low, high, text }) {
  const attributes = { "aria-valuenow": now, "aria-valuemin": low, "aria-valuemax": high, "aria-valuetext": text };
  setAttributes(element, attributes);
}

// The stage: two masses, a spring and a paper tape -----------------------------------------------------------------
// The tape runs downwards below the masses and keeps where they have been.

const STAGE = { margin: 48, rail1: 44, rail2: 130, tape: 172, speed: 64, reach: 1, stride: 0.25 };
const REST = 0.004; // of the stage: masses that are this near to each other, and stay, are at rest

const scene = {
  body: null,
  before: null,
  shown: [0, 0],
  held: null,
  due: 0,
  tape: [],
  clock: 0,
  rate: 60,
  lost: false,
  touched: false,
};
let stageMotion;

function stageScale() {
  const { width } = sizeOf(byId("stage"));
  return makeScale([-STAGE.reach, STAGE.reach], [STAGE.margin, Math.max(STAGE.margin + 1, width - STAGE.margin)]);
}

/** Pull the weights away from their average, as far as looks good. */
function pluck() {
  const [w1, w2] = pluckedPlaces();
  scene.body = makeBody(w1, w2);
  scene.before = scene.body;
  Object.assign(scene, { shown: [w1, w2], due: 0, lost: false });
}

/** Return where a plucked pair begins. A spring that repels moves both masses past the weights: it gets room for that. */
function pluckedPlaces() {
  const { a, b } = current.coupling;
  if (a >= 0 || a + b <= 0) return [0.62, -0.38];
  const way = b / (a + b); // from w2 to where the two meet, in distances between them
  const apart = Math.min(1, (1.6 * STAGE.reach) / way);
  return [(1 - way / 2) * apart, (-way / 2) * apart];
}

/** Pluck the spring and let it swing. */
function startStage() {
  pluck();
  runStage(true);
}

function makeBody(w1, w2) {
  return { w1, w2, v1: 0, v2: 0, mean: 0, step: state.mode === "schedule-free" ? state.step : 1 };
}

/** Return the pair after one step of the method, on a parabola of curvature h if the gradient is on. */
function stepBody(body) {
  const next = { ...body, step: body.step + 1 };
  const noise = byId("stage-noise").checked ? (Math.random() - 0.5) * state.curvature : 0;
  const gradient = byId("stage-push").checked ? state.curvature * body.w1 + noise : 0;
  next.mean = state.momentum * body.mean + (1 - state.momentum) * gradient;
  moveOne(next, stageMover(body.step), -state.lr * next.mean);
  return next;
}

const mover = { state: null, step: 0, found: null };

/** Return the motion of a step; most methods have the same at every step, and it is not computed again. */
function stageMover(step) {
  const varies = ["lookahead", "schedule-free"].includes(state.mode);
  if (mover.state !== state || (varies && mover.step !== step))
    Object.assign(mover, { state, step, found: moverOf(state, step) });
  return mover.found;
}

/** Show as many steps per second as make the motion neither a blur nor a standstill. */
function setStageRate() {
  const memory = current.halfLife ?? state.every;
  const descent = byId("stage-push").checked && current.isStable ? Math.log(0.5) / Math.log(current.radius) : 0;
  const slowest = Math.max(Number.isFinite(memory) ? memory : 1, Number.isFinite(descent) ? descent : 1);
  scene.rate = Number(clamp(slowest / 0.5, 4, 20000).toPrecision(1));
}

/** Advance the spring by a time, in slices of a frame, so that the tape is even. */
function advanceStage(seconds) {
  const slices = Math.max(1, Math.round(seconds * 60));
  for (let i = 0; i < slices && !scene.lost; i++) advanceSlice(seconds / slices);
  drawStage();
  return !scene.lost && !isAtRest();
}

function advanceSlice(seconds) {
  scene.due += seconds * scene.rate;
  for (; scene.due >= 1; scene.due--) {
    scene.before = scene.body;
    scene.body = hold(stepBody(scene.body));
  }
  const share = scene.rate < 60 ? scene.due : 1; // few steps per second: glide from one to the next
  scene.shown = [0, 1].map((i) => mix(placesOf(scene.before)[i], placesOf(scene.body)[i], share));
  scene.clock += seconds;
  scene.tape.push([scene.clock, ...scene.shown]);
  scene.lost = !scene.shown.every((place) => Math.abs(place) < 1e3);
}

/** Keep the mass that a hand holds at its place, without velocity. */
function hold(body) {
  if (!scene.held) return body;
  const { which, place } = scene.held;
  return { ...body, [`w${which}`]: place, [`v${which}`]: 0 };
}

const placesOf = ({ w1, w2 }) => [w1, w2];

function isAtRest() {
  if (scene.held || byId("stage-noise").checked) return false;
  const recent = scene.tape.slice(-40).flatMap(([, first, second]) => [first, second]);
  const apart = Math.abs(scene.shown[0] - scene.shown[1]);
  const spread = (i) => {
    const own = recent.filter((_, at) => at % 2 === i);
    return Math.max(...own) - Math.min(...own);
  };
  return scene.tape.length >= 40 && spread(0) < REST && spread(1) < REST && (apart < 2 * REST || scene.rate < 1e-9);
}

function drawStage() {
  const scale = stageScale();
  drawMasses(scale);
  drawTape(scale);
  drawStageWords();
}

function buildStage() {
  const svg = byId("stage");
  for (const name of ["rail1", "rail2", "zero", "coil", "arrow1", "arrow2"]) draw("path", { id: `stage-${name}` }, svg);
  draw("text", { id: "stage-hint", text: "drag a mass" }, svg);
  draw("text", { id: "stage-zero-text", "text-anchor": "middle", text: "minimum" }, svg);
  for (const which of [1, 2]) buildMass(svg, which);
  makeStageMotion();
  byId("stage-run").addEventListener("click", () => runStage(!stageMotion.running));
  byId("stage-pluck").addEventListener("click", () => (stillness.matches ? showPluck() : startStage()));
  byId("stage-step").addEventListener("click", () => {
    runStage(false);
    advanceStage(stageStride() / scene.rate);
  });
  for (const id of ["stage-push", "stage-noise"]) byId(id).addEventListener("change", changeForce);
}

function showPluck() {
  pluck();
  drawStage();
}

/** Noise comes with gradients: without them there is nothing that it could disturb. */
function changeForce(event) {
  if (event.target.id === "stage-noise" && event.target.checked) byId("stage-push").checked = true;
  if (event.target.id === "stage-push" && !event.target.checked) byId("stage-noise").checked = false;
  setStageRate();
  drawStage();
  if (!stillness.matches) runStage(true);
}

function buildMass(svg, which) {
  const words = which === 1 ? "The weights w1" : "The average w2";
  const group = draw("g", { id: `mass${which}`, class: "grab", role: "slider", tabindex: 0, "aria-label": words }, svg);
  draw("circle", { class: "halo" }, group);
  draw("circle", { class: "body" }, group);
  draw("circle", { class: "hit" }, group);
  draw("text", { "text-anchor": "middle", y: 4, text: `w${which}` }, group);
  const move = (place) => moveMass(which, place);
  makeDraggable(group, svg, {
    move: (x) => move(stageScale().invert(x)),
    end: () => release(),
  });
  makeKeyable(group, (across, up) => {
    move(scene.shown[which - 1] + 0.02 * (across + up));
    release();
  });
}

function moveMass(which, place) {
  const at = clamp(place, -1.1 * STAGE.reach, 1.1 * STAGE.reach);
  scene.held = { which, place: at };
  scene.touched = true;
  scene.body = hold(scene.body);
  scene.before = scene.body;
  scene.shown[which - 1] = at;
  scene.lost = false;
  if (stillness.matches) drawStage();
  else runStage(true);
}

function release() {
  scene.held = null;
}

function runStage(running) {
  if (running) stageMotion.start();
  else stageMotion.stop();
  drawStageButtons();
}

function drawStageButtons() {
  const running = Boolean(stageMotion?.running);
  const button = byId("stage-run");
  if (button.textContent !== (running ? "Pause" : "Run")) button.textContent = running ? "Pause" : "Run";
  button.hidden = stillness.matches;
  const stride = stageStride();
  byId("stage-step").textContent = stride === 1 ? "Step" : `${show(stride)} steps`;
}

const stageStride = () => Math.max(1, Math.round(scene.rate * STAGE.stride));

function makeStageMotion() {
  stageMotion = makeMotion((seconds) => {
    const goesOn = advanceStage(seconds);
    if (!goesOn) queueMicrotask(drawStageButtons);
    return goesOn;
  });
}

/** Return how large a mass is drawn: the less of the distance it moves per step, the heavier it is. */
function massRadius(share) {
  return share === 0 ? 27 : clamp(14 + 4 * Math.log10(1 / Math.abs(share)), 14, 26);
}

function drawMasses(scale) {
  const { a, b } = current.coupling;
  const places = scene.shown.map((place) => clamp(scale(place), 8, scale(STAGE.reach) + STAGE.margin - 8));
  const rails = [STAGE.rail1, STAGE.rail2];
  const [low, high] = [scale(-STAGE.reach), scale(STAGE.reach)];
  rails.forEach((y, i) => {
    setAttributes(byId(`stage-rail${i + 1}`), { d: `M${low} ${y}H${high}`, class: "grid" });
    drawMass(i + 1, places[i], y, massRadius(i ? b : a), i ? b : a);
  });
  drawCoil(places, rails, [massRadius(a), massRadius(b)]);
  drawForces(places, rails, [a, b]);
  drawHint(places[0]);
  drawMinimum(scale);
}

function drawMass(which, x, y, radius, share) {
  const group = byId(`mass${which}`);
  const colour = which === 1 ? "var(--plain)" : "var(--belay)";
  const [halo, body, hit] = group.querySelectorAll("circle");
  group.setAttribute("transform", `translate(${x.toFixed(1)} ${y})`);
  setAttributes(halo, { r: radius + 5 });
  setAttributes(hit, { r: Math.max(22, radius) });
  const still = share === 0 ? "4 3" : "none"; // a mass that the spring cannot move has a broken outline
  setAttributes(body, {
    r: radius,
    style: `fill:var(--raised);stroke:${colour};stroke-width:3;stroke-dasharray:${still}`,
  });
  const place = scene.shown[which - 1];
  setSlider(group, { now: place.toFixed(3), low: -1, high: 1, text: show(Number(place.toFixed(2))) });
}

/** Draw the coil as an even zigzag between the two rims. */
function drawCoil([x1, x2], [y1, y2], [radius1, radius2]) {
  const turns = 16;
  const length = Math.hypot(x2 - x1, y2 - y1);
  const [along, across] = [
    [(x2 - x1) / length, (y2 - y1) / length],
    [-(y2 - y1) / length, (x2 - x1) / length],
  ];
  const [start, end] = [radius1, length - radius2];
  let path = "";
  for (let i = 0; i <= turns; i++) {
    const at = mix(start, end, i === 0 ? 0 : i === turns ? 1 : 0.1 + (0.8 * (i - 0.5)) / (turns - 1));
    const off = i === 0 || i === turns ? 0 : i % 2 ? 7 : -7;
    const [x, y] = [x1 + along[0] * at + across[0] * off, y1 + along[1] * at + across[1] * off];
    path += `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
  }
  const repels = current.coupling.a < 0;
  const style = `stroke:var(--coil);stroke-width:1.5;stroke-dasharray:${repels ? "3 3" : "none"}`;
  setAttributes(byId("stage-coil"), { d: path, class: "curve", style });
}

/** Draw the pull on each mass as an arrow along its rail: the heavier mass has the shorter one. */
function drawForces([x1, x2], [y1, y2], [a, b]) {
  const unit = 0.3 / Math.max(Math.abs(a), Math.abs(b), 1e-12);
  const arrow = (x, y, pull) =>
    Math.abs(pull) < 3
      ? ""
      : `M${x} ${y}h${pull}m${-5 * Math.sign(pull)} -4l${5 * Math.sign(pull)} 4l${-5 * Math.sign(pull)} 4`;
  const style = "stroke:var(--coil);stroke-width:1.5";
  const above = massRadius(a) + 9;
  const below = massRadius(b) + 9;
  setAttributes(byId("stage-arrow1"), { d: arrow(x1, y1 - above, (x2 - x1) * a * unit), class: "curve", style });
  setAttributes(byId("stage-arrow2"), { d: arrow(x2, y2 + below, (x1 - x2) * b * unit), class: "curve", style });
}

/** Say that masses can be dragged, until one has been. */
function drawHint(x) {
  const room = x < sizeOf(byId("stage")).width - 150;
  const place = { x: room ? x + 40 : x - 40, y: STAGE.rail1 - 8, "text-anchor": room ? "start" : "end" };
  setAttributes(byId("stage-hint"), { ...place, visibility: scene.touched ? "hidden" : "visible" });
}

function drawMinimum(scale) {
  const shown = byId("stage-push").checked;
  const { height } = sizeOf(byId("stage"));
  setAttributes(byId("stage-zero"), {
    d: shown ? `M${scale(0)} 14V${height}` : "",
    class: "axis",
    style: "stroke-dasharray:2 4",
  });
  setAttributes(byId("stage-zero-text"), { x: scale(0), y: 11, visibility: shown ? "visible" : "hidden" });
}

function drawTape(scale) {
  const { context, width, height } = fitCanvas(byId("tape"));
  context.clearRect(0, 0, width, height);
  const oldest = scene.clock - (height - STAGE.tape) / STAGE.speed;
  while (scene.tape.length > 2 && scene.tape[1][0] < oldest) scene.tape.shift();
  context.lineJoin = "round";
  for (const [index, colour, thickness] of [
    [1, colours.plain, 1.25],
    [2, colours.belay, 2.75],
  ]) {
    context.beginPath();
    for (const entry of scene.tape)
      context.lineTo(scale(entry[index]), STAGE.tape + (scene.clock - entry[0]) * STAGE.speed);
    context.strokeStyle = colour;
    context.lineWidth = thickness;
    context.stroke();
  }
}

function drawStageWords() {
  const { a, b } = current.coupling;
  const kind = a > 0 ? "pulls the weights back" : a < 0 ? "pushes the weights away" : "leaves the weights alone";
  const share = a === 0 ? "" : ` by ${show(Math.abs(a) * 100)}% of the distance per step`;
  const follows = b === 0 ? "The average stays at its place" : `The average follows by ${show(b * 100)}%`;
  const pace = stillness.matches ? "" : ` Shown at ${show(scene.rate)} steps per second.`;
  const words = `The spring ${kind}${share}. ${follows}.${pace}`;
  const lost = "The pair has left the stage: pluck it again, or lower the learning rate.";
  const beyond = scene.shown.every((place) => Math.abs(place) > 1.2 * STAGE.reach);
  const where = beyond ? " The pair is beyond the edge of the stage: pluck it again." : "";
  setText(byId("stage-text"), scene.lost ? lost : words + where);
}

// The state and its settings ---------------------------------------------------------------------------------------

let state = null; // the setting that is shown; always one without a problem
let current = null; // what follows from it: analyze(state)

const SETTINGS = {
  k: { label: "k", words: "stiffness", low: 1e-3, high: 100, log: true, mode: "spring" },
  m1: { label: "m1", words: "mass of the weights", low: 0.1, high: 1e5, log: true, mode: "spring", endless: true },
  m2: { label: "m2", words: "mass of the average", low: 0.1, high: 1e5, log: true, mode: "spring" },
  damping: { label: "δ", words: "damping", low: 1e-3, high: 1, log: true, mode: "spring" },
  theta: { label: "θ", words: "pull ÷ follow", low: -0.99, high: 3, mode: "centred" },
  c: { label: "c", words: "averaging rate", low: 1e-4, high: 0.99, log: true, mode: "centred" },
  every: { label: "K", words: "steps in a round", low: 1, high: 50, whole: true, mode: "lookahead" },
  alpha: { label: "α", words: "share of the way", low: 0.01, high: 1, mode: "lookahead" },
  mu: { label: "β", words: "momentum of the method", low: 0, high: 0.99, mode: "momentum" },
  step: { label: "t", words: "step that is shown", low: 2, high: 1e4, log: true, whole: true, mode: "schedule-free" },
  lr: { label: "η", words: "learning rate", low: 1e-5, high: 10, log: true },
  momentum: { label: "β1", words: "inner momentum", low: 0, high: 0.99 },
  curvature: { label: "h", words: "curvature", low: 1e-2, high: 1e4, log: true },
  speed: { label: "", words: "steps per second", low: 1, high: 2000, log: true },
};
const FIELDSETS = [
  ["The spring", ["k", "m1", "m2", "damping"]],
  ["Its pull and its rate", ["theta", "c"]],
  ["The method", ["every", "alpha", "mu", "step"]],
  ["The optimizer and the loss", ["lr", "momentum", "curvature"]],
];
const TURNS = 1000; // positions of a slider

/** Return the value at a position 0 to 1 of a slider, rounded to what a person would type. */
function valueAtShare(setting, share) {
  const { low, high, log, whole, endless } = setting;
  if (endless && share >= 1) return Infinity;
  const exact = log ? low * (high / low) ** share : mix(low, high, share);
  return whole ? Math.round(exact) : Number(log ? exact.toPrecision(3) : exact.toFixed(3));
}

function shareOfValue({ low, high, log }, value) {
  if (value === Infinity) return 1;
  return clamp(log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low), 0, 1);
}

function buildControls() {
  for (const [words, keys] of FIELDSETS) {
    const group = document.createElement("fieldset");
    const legend = document.createElement("legend");
    legend.textContent = words;
    group.append(legend, ...keys.map((key) => makeControl(key)));
    byId("controls").append(group);
  }
  byId("theta").closest("fieldset").append(makeFollow());
  const why = document.createElement("p");
  Object.assign(why, { id: "why", className: "why" });
  why.setAttribute("role", "alert");
  byId("controls").append(why);
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("race-sliders").append(makeControl("lr", "race-"), makeControl("speed", "race-"));
}

/** Return a label, a field and a slider of one setting; a setting may have several of them on the page. */
function makeControl(key, prefix = "") {
  const setting = SETTINGS[key];
  const box = document.createElement("div");
  Object.assign(box, { className: "control" });
  box.dataset.key = key;
  const label = document.createElement("label");
  const symbol = document.createElement("b");
  const words = document.createElement("i");
  symbol.textContent = setting.label;
  words.textContent = setting.label ? ` ${setting.words}` : setting.words;
  label.append(symbol, words);
  const field = document.createElement("input");
  Object.assign(field, { type: "text", inputMode: "decimal", id: `${prefix}${key}`, spellcheck: false });
  label.htmlFor = field.id;
  const slider = document.createElement("input");
  Object.assign(slider, { type: "range", min: 0, max: TURNS, id: `${prefix}${key}-slider` });
  slider.setAttribute("aria-label", `${setting.label} ${setting.words}`.trim());
  slider.addEventListener("input", () => change(key, valueAtShare(setting, slider.value / TURNS), slider));
  field.addEventListener("change", () => change(key, readNumber(field.value), field));
  field.addEventListener("keydown", (event) => nudge(event, key, field));
  box.append(label, field, slider);
  return box;
}

/** Return the choice of what the average follows: the weights before the step, or those that the optimizer stepped. */
function makeFollow() {
  const label = document.createElement("label");
  label.className = "check";
  const box = document.createElement("input");
  Object.assign(box, { type: "checkbox", id: "follow" });
  box.addEventListener("change", () => update({ follow: box.checked ? "after" : "before" }));
  label.append(box, "w2 follows the stepped weights");
  return label;
}

function renderFollow() {
  const box = byId("follow");
  box.checked = state.follow === "after";
  box.disabled = current.hasVelocity;
  box.parentElement.hidden = !["spring", "centred"].includes(state.mode);
}

/** Let the arrows up and down change a typed number by one position of its slider. */
function nudge(event, key, field) {
  const step = { ArrowUp: 1, ArrowDown: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const setting = SETTINGS[key];
  const share = shareOfValue(setting, readNumber(field.value)) + (step * (event.shiftKey ? 50 : 5)) / TURNS;
  change(key, valueAtShare(setting, clamp(share, 0, 1)));
}

/** Change one setting; what belongs to another kind of method changes the method with it. */
function change(key, value, source = null) {
  const mode = SETTINGS[key].mode;
  const changes = { [key]: value };
  if (mode === "spring") changes.mode = "spring";
  const damping = key === "damping" ? value : state.damping;
  if (mode === "spring" && damping < 1) changes.follow = "before"; // with velocities there is no other
  if (mode === "centred" && state.mode !== "centred") Object.assign(changes, asCentred(), { [key]: value });
  update(changes, source);
}

/** Return the setting that is shown as one pull θ and one rate c. */
function asCentred() {
  const { theta, c } = centredOf(state) ?? state;
  const usable = theta >= NEAREST && c > 0 && c < 1;
  const follow = state.mode === "spring" ? state.follow : "after";
  return { mode: "centred", follow, ...(usable ? { theta, c } : {}) };
}

/** Take over changes of the state if they have no problem; else say what the problem is. */
function update(changes, source = null) {
  const next = { ...state, ...changes };
  const words = problem(next);
  setText(byId("why"), words ?? "");
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  if (words) {
    source?.setAttribute("aria-invalid", "true");
    return;
  }
  const races = RACERS.some((key) => next[key] !== state[key]);
  state = next;
  current = analyze(state);
  sources.add(source);
  renderSoon();
  if (races) rerunRaceSoon();
  writeAddressLater();
}
const sources = new Set(); // sliders that are moved right now: they are where the hand is, and are not set back
const RACERS = [
  "mode",
  "k",
  "m1",
  "m2",
  "damping",
  "follow",
  "theta",
  "c",
  "every",
  "alpha",
  "mu",
  "lr",
  "momentum",
  "fn",
  "x",
  "y",
  "seed",
];

function renderControls() {
  const derived = centredOf(state);
  for (const box of document.querySelectorAll(".control")) {
    const setting = SETTINGS[box.dataset.key];
    const value = derived && setting.mode === "centred" ? derived[box.dataset.key] : state[box.dataset.key];
    const [field, slider] = box.querySelectorAll("input");
    if (document.activeElement !== field || !sources.has(field)) field.value = show(value, 4).replace("−", "-");
    if (!sources.has(slider)) slider.value = Math.round(TURNS * shareOfValue(setting, value));
    slider.setAttribute("aria-valuetext", show(value, 4));
    box.classList.toggle("off", isIdle(setting));
    box.hidden = isForeign(setting);
  }
  sources.clear();
  renderFollow();
  for (const group of byId("controls").querySelectorAll("fieldset")) {
    group.hidden = [...group.querySelectorAll(".control")].every((box) => box.hidden);
  }
}

/** Whether a setting does not act at present: moving it changes the method. */
function isIdle({ mode }) {
  return mode === "spring" && state.mode !== "spring";
}

/** Whether a setting belongs to a method that is not shown. */
function isForeign({ mode }) {
  if (mode === "momentum") return !["nesterov", "schedule-free"].includes(state.mode);
  return ["lookahead", "schedule-free"].includes(mode) && mode !== state.mode;
}

function buildPresets() {
  for (const { id, label } of PRESETS) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", textContent: label });
    button.dataset.preset = id;
    button.addEventListener("click", () => {
      update(withPreset(state, id));
      if (stillness.matches) showPluck();
      else startStage();
    });
    byId("presets").append(button);
  }
}

function renderPresets() {
  for (const button of byId("presets").children) {
    const wanted = withPreset(state, button.dataset.preset);
    const same = Object.keys(wanted).every((key) => isNear(wanted[key], state[key]));
    button.setAttribute("aria-pressed", same);
  }
}

const isNear = (a, b) => a === b || (typeof a === "number" && Math.abs(a - b) <= 1e-9 * Math.abs(a));

// Numbers ----------------------------------------------------------------------------------------------------------

function renderNumbers() {
  const rows = [
    ["effective rate", show(current.effectiveLr), `${show(current.effectiveLrScale, 4)} × η`],
    [
      "half-life",
      current.halfLife === null ? "–" : show(current.halfLife),
      current.halfLife === null ? `rounds of ${state.every} steps` : "steps",
    ],
    ["regime", current.regime, current.hasVelocity ? "with velocities" : "positions only"],
    [
      "θ, and its floor",
      current.theta === null ? "–" : show(current.theta),
      `floor ${current.thetaFloor === null ? "–" : show(current.thetaFloor)}`,
    ],
    ["edge of stability", show(current.maxStableLr), `η at h = ${show(state.curvature)}`],
    ["noise left", show(current.noise), "× that of SGD"],
  ];
  const bad = new Set([
    current.regime === "unstable" && 2,
    current.theta < current.thetaFloor && 3,
    !current.isStable && 4,
    !current.isStable && 5,
  ]);
  const list = byId("numbers");
  while (list.children.length < rows.length) list.append(numberCell());
  rows.forEach(([words, value, unit], i) => {
    const [term, number, more] = list.children[i].children;
    setText(term, words);
    setText(number, value);
    setText(more, unit);
    list.children[i].classList.toggle("bad", bad.has(i));
  });
  setText(byId("sentence"), current.explanation);
}

function numberCell() {
  const cell = document.createElement("div");
  const more = document.createElement("dd");
  more.className = "more";
  cell.append(document.createElement("dt"), document.createElement("dd"), more);
  return cell;
}

// Figures ----------------------------------------------------------------------------------------------------------

/** Return `count` numbers from low to high, evenly in their logarithm. */
function logSpace(low, high, count) {
  return Array.from({ length: count }, (_, i) => low * (high / low) ** (i / (count - 1)));
}

const THIN = { colour: "var(--plain)", width: 1.25 };
const THICK = { colour: "var(--belay)", width: 2.75 };

// Root locus: the eigenvalues of a step in the complex plane, while the curvature grows.

const locus = { key: "", curvatures: [], roots: [], branches: [] };

function renderLocus() {
  const plot = makePlot(byId("locus"), squareAxes(byId("locus")));
  const edge = current.maxStableCurvature;
  sampleLocus(edge);
  drawUnitCircle(plot);
  const inside = locus.curvatures.findIndex((h) => h >= edge);
  const last = inside < 0 ? locus.curvatures.length - 1 : inside;
  for (let i = 0; i < 5; i++) {
    const branch = locus.branches[i] ?? [];
    curve(plot, `stable${i}`, branch.slice(0, last + 1), { colour: "var(--ink)", width: 1.75 });
    curve(plot, `unstable${i}`, branch.slice(last), { colour: "var(--bad)", width: 1.5, dash: "3 4" });
  }
  drawRoots(plot, "edge", edge > 0 && edge < Infinity ? eigenvalues(state, edge) : [], "diamond");
  drawRoots(plot, "here", current.eigenvalues, "circle");
}

/** Return axes with the unit circle in view and equal scales. */
function squareAxes(svg) {
  const { width, height } = sizeOf(svg);
  const unit = Math.min((width - 48) / 2.9, (height - 30) / 2.5);
  const [across, up] = [(width - 48) / unit / 2, (height - 30) / unit / 2];
  const x = { domain: [-0.2 - across, -0.2 + across], ticks: [-1, 0, 1] };
  return { x, y: { domain: [-up, up], ticks: [-1, 0, 1] }, margin: [6, 12, 24, 36] };
}

/** Compute the locus, unless the curvature alone has changed: it only moves the roots along it. */
function sampleLocus(edge) {
  const key = JSON.stringify({ ...state, curvature: 0, x: 0, y: 0, m1: String(state.m1), edge });
  if (locus.key === key) return;
  locus.key = key;
  const middle = edge > 0 && edge < Infinity ? edge : state.curvature;
  const count = current.eigenvalues.length > 2 ? 110 : 180;
  const even = Array.from({ length: count }, (_, i) => (middle * (i + 1)) / count); // near the edge branches turn
  const slow = logSpace(middle * 1e-4, middle, count / 3);
  const beyond = logSpace(middle * 1.0001, middle * 8, count / 3);
  locus.curvatures = [...even, ...slow, ...beyond].sort((a, b) => a - b);
  locus.roots = rootLocus(state, locus.curvatures);
  locus.branches = followBranches(locus.roots);
}

/** Join the roots of one curvature to the nearest roots of the next: one branch per root. */
function followBranches(samples) {
  const branches = samples[0].map((root) => [root]);
  for (const roots of samples.slice(1)) {
    const left = [...roots];
    for (const branch of branches) {
      const [x, y] = branch.at(-1);
      const distances = left.map((root) => Math.hypot(root[0] - x, root[1] - y));
      const nearest = distances.indexOf(Math.min(...distances));
      if (nearest >= 0) branch.push(...left.splice(nearest, 1));
    }
  }
  return branches;
}

function drawUnitCircle(plot) {
  const [x, y, r] = [plot.x(0), plot.y(0), plot.x(1) - plot.x(0)];
  mark(
    plot,
    "disc",
    "circle",
    { cx: x, cy: y, r, style: "fill:var(--stable);stroke:var(--critical);stroke-width:1.25" },
    "ground",
  );
  const [low, high] = plot.y.domain.map(plot.y);
  mark(
    plot,
    "real",
    "path",
    { class: "grid", d: `M${plot.x.domain.map(plot.x)[0]} ${y}H${plot.x.domain.map(plot.x)[1]}` },
    "ground",
  );
  mark(plot, "imaginary", "path", { class: "grid", d: `M${x} ${low}V${high}` }, "ground");
}

function drawRoots(plot, name, roots, shape) {
  for (let i = 0; i < 5; i++) {
    const [re, im] = roots[i] ?? [NaN, NaN];
    const [low, high] = plot.x.domain;
    const seen = re > low && re < high && Math.abs(im) < plot.y.domain[1];
    const [x, y] = [plot.x(re), plot.y(im)];
    const d = !seen
      ? ""
      : shape === "circle"
        ? `M${x - 6} ${y}a6 6 0 1 0 12 0a6 6 0 1 0 -12 0`
        : `M${x} ${y - 6}l6 6l-6 6l-6 -6z`;
    const fill = shape === "circle" ? (current.isStable ? "var(--belay)" : "var(--bad)") : "var(--raised)";
    const style = `fill:${fill};stroke:${shape === "circle" ? "var(--raised)" : "var(--bad)"};stroke-width:1.75`;
    mark(plot, `${name}${i}`, "path", { d, style }, name);
  }
}

/** Set the curvature whose roots lie nearest to a point of the plane. */
function dragRoots(pixelX, pixelY) {
  const plot = makePlot(byId("locus"), squareAxes(byId("locus")));
  const distance = ([re, im]) => Math.hypot(plot.x(re) - pixelX, plot.y(im) - pixelY);
  let best = [Infinity, state.curvature];
  locus.roots.forEach((roots, i) => {
    const nearest = Math.min(...roots.map(distance));
    if (nearest < best[0]) best = [nearest, locus.curvatures[i]];
  });
  setCurvature(best[1]);
}

function setCurvature(value) {
  const { low, high } = SETTINGS.curvature;
  update({ curvature: Number(clamp(value, low, high).toPrecision(3)) });
}

// The edge: all curvatures on one line, the stable ones shaded; the handle is the curvature.

function edgeAxes() {
  const { low, high } = SETTINGS.curvature;
  return { x: { domain: [low, high], log: true }, y: { domain: [0, 1], ticks: [] }, margin: [20, 12, 22, 36] };
}

function renderEdge() {
  const plot = makePlot(byId("edge"), edgeAxes());
  const edge = clamp(current.maxStableCurvature, plot.x.domain[0], plot.x.domain[1]);
  const [left, to, here] = [plot.x(plot.x.domain[0]), plot.x(edge), plot.x(clamp(state.curvature, ...plot.x.domain))];
  const [top, bottom] = [plot.y(1), plot.y(0)];
  mark(
    plot,
    "stable",
    "rect",
    { x: left, y: top, width: to - left, height: bottom - top, style: "fill:var(--stable)" },
    "ground",
  );
  const inside = current.maxStableCurvature <= plot.x.domain[1];
  mark(
    plot,
    "edge",
    "path",
    { d: inside ? `M${to} ${top}V${bottom}` : "", style: "stroke:var(--bad);stroke-width:2" },
    "ground",
  );
  const side = to > (left + plot.x(plot.x.domain[1])) / 2 ? "end" : "start";
  const words = inside ? `edge ${show(current.maxStableCurvature)}` : "";
  mark(plot, "words", "text", { x: to, y: top - 4, "text-anchor": side, text: words }, "ground");
  const handle = byId("curvature-handle") ?? buildCurvatureHandle(layer(plot.svg, "handle"));
  handle.setAttribute("transform", `translate(${here} ${(top + bottom) / 2})`);
  handle.querySelector(".body").style.fill = current.isStable ? "var(--belay)" : "var(--bad)";
  const [low, high] = plot.x.domain;
  const verdict = current.isStable ? "stable" : "not stable";
  setSlider(handle, { now: state.curvature, low, high, text: `${show(state.curvature)}, ${verdict}` });
}

function buildCurvatureHandle(parent) {
  const words = "Curvature h of the loss";
  const attributes = { id: "curvature-handle", class: "grab", role: "slider", tabindex: 0, "aria-label": words };
  const handle = draw("g", attributes, parent);
  draw("circle", { class: "halo", r: 12 }, handle);
  draw("circle", { class: "hit", r: 22 }, handle);
  draw("circle", { class: "body", r: 8, style: "stroke:var(--raised);stroke-width:2" }, handle);
  makeKeyable(
    handle,
    (across, up) => setCurvature(state.curvature * 1.05 ** (across + up)),
    (end) => setCurvature(end ? SETTINGS.curvature.high : SETTINGS.curvature.low),
  );
  return handle;
}

function buildLocus() {
  const strip = byId("edge");
  const plane = byId("locus");
  strip.classList.add("grab");
  plane.classList.add("grab");
  const along = (x) => setCurvature(makePlot(strip, edgeAxes()).x.invert(x));
  makeDraggable(strip, strip, { move: along, hand: "curvature-handle" });
  makeDraggable(plane, plane, { move: dragRoots, hand: "curvature-handle" });
}

const rootWords = (count) =>
  count === 1 ? "the root lies" : count === 2 ? "both roots lie" : `all ${count} roots lie`;

function sayLocus() {
  const edge = current.maxStableCurvature;
  const where = edge > 0 && edge < Infinity ? ` The edge of stability (◇) is at h = ${show(edge)}.` : "";
  const words = `At curvature h = ${show(state.curvature)}, ${stabilityWords()}.${where} Drag a root or the handle.`;
  setText(byId("locus-text"), words);
}

function stabilityWords() {
  const { isStable, radius, eigenvalues: roots } = current;
  if (isStable) {
    const size = show(radius, 4);
    return `${rootWords(roots.length)} inside the unit circle, and errors shrink to ${size} of themselves per step`;
  }
  if (radius > 1) return `a root lies outside the unit circle, and errors grow by ${show(radius, 4)} per step`;
  return "the pair is not stable";
}

// Noise against speed: theorem 3's curve, EMA's, and the setting as a dot.

function renderNoise() {
  const found = noiseCurves(state, 90);
  const svg = byId("noise");
  svg.style.opacity = found ? 1 : 0.25;
  if (!found) {
    const reason = "Plain SGD is not stable at this learning rate and curvature: there is no noise to compare with.";
    setText(byId("noise-text"), `${reason} Lower η or h.`);
    return;
  }
  const plot = makePlot(svg, noiseAxes(found));
  const pair = ({ speed, noise }) => [speed, noise];
  curve(plot, "ema", found.ema.map(pair), { colour: "var(--ema)", dash: "7 4" });
  curve(plot, "critical", found.critical.map(pair), { colour: "var(--critical)" });
  labelCurve(plot, "ema-words", found.ema, 0.42, "EMA", "var(--ema)", [-10, -8, "end"]);
  labelCurve(plot, "critical-words", found.critical, 0.5, "critical damping", "var(--critical)", [10, 14, "start"]);
  drawSgd(plot, found.sgd);
  drawHere(plot, found.here);
  sayNoise(found);
}

function noiseAxes({ ema, critical, sgd, here }) {
  const all = [...ema, ...critical, sgd];
  const speeds = all.map((point) => point.speed).filter((speed) => speed > 0);
  const noises = all.map((point) => point.noise);
  const shown = here.speed > 0 && Number.isFinite(here.noise);
  const tall = shown ? clamp(here.noise, 1, 1e4) : 1;
  const low = shown ? clamp(here.noise, 1e-6, 1) : 1;
  return {
    x: {
      domain: decades(Math.min(...speeds, shown ? here.speed : 1), Math.max(...speeds, shown ? here.speed : 0)),
      log: true,
      label: "speed: share of the error that a step removes",
    },
    y: {
      domain: decades(Math.min(...noises, low), Math.max(1, tall)),
      log: true,
      label: "variance of w2, SGD's weights = 1",
    },
  };
}

/** Return whole half-decades around a range, so that axes rest while a setting moves. */
function decades(low, high) {
  const floor = Math.floor(2 * Math.log10(low) + 0.1) / 2;
  const ceiling = Math.ceil(2 * Math.log10(high) + 0.3) / 2;
  return [10 ** floor, 10 ** ceiling];
}

function labelCurve(plot, name, points, share, text, colour, [dx, dy, anchor]) {
  const { speed, noise } = points[Math.floor(share * (points.length - 1))] ?? { speed: NaN, noise: NaN };
  const [x, y] = [plot.x(speed) + dx, plot.y(noise) + dy];
  const attributes = { "text-anchor": anchor, text, style: `fill:${colour}` };
  placeMark(plot, name, "text", { x, y }, attributes, "words");
}

/** Draw a mark at a place, or hide it if the place is not finite. */
function placeMark(plot, name, kind, place, attributes, where) {
  const seen = Object.values(place).every(Number.isFinite);
  const visibility = seen ? "visible" : "hidden";
  mark(plot, name, kind, { ...(seen ? place : {}), ...attributes, visibility }, where);
}

function drawSgd(plot, { speed, noise }) {
  const [x, y] = [plot.x(speed), plot.y(noise)];
  const seen = Number.isFinite(x);
  mark(plot, "sgd", "path", { d: seen ? `M${x} ${y - 6}l5.5 10h-11z` : "", style: "fill:var(--plain)" });
  placeMark(plot, "sgd-words", "text", { x: x - 10, y: y + 4 }, { "text-anchor": "end", text: "SGD" });
}

function drawHere(plot, { speed, noise }) {
  const seen = speed > 0 && Number.isFinite(noise) && noise > 0;
  const place = { cx: seen ? plot.x(speed) : NaN, cy: clamp(plot.y(noise), 4, plot.height) };
  placeMark(plot, "here", "circle", place, { r: 7, style: "fill:var(--belay);stroke:var(--raised);stroke-width:2" });
}

function sayNoise({ here }) {
  if (!(here.speed > 0) || !Number.isFinite(here.noise)) {
    setText(byId("noise-text"), "This setting is not stable here: its noise has no bound, and it has no dot.");
    return;
  }
  const speed = `a step removes ${show(here.speed * 100)}% of the error`;
  const noise = `the average keeps ${show(here.noise)} of the variance of SGD's weights${criticalWords(here.speed)}`;
  setText(byId("noise-text"), `The dot is this setting: ${speed}, and ${noise}.`);
}

/** Compare the noise with that of critical damping at the same speed, if that exists. */
function criticalWords(speed) {
  const { theta, c } = critical(state.curvature, state.lr, speed);
  if (!(theta > -1 && c > 0 && c < 1 && speed <= state.curvature * state.lr)) return "";
  const best = couplingOf({ mode: "centred", theta, c, follow: "after" });
  const least = stationaryVariance(best, state.curvature, state.lr, state.noise).w2;
  return `, ${show(current.variance.w2 / least)} times as much as critical damping at this speed (theorem 3)`;
}

// Impulse response: one unit update at step 0, and what weights and average make of it.

function renderImpulse() {
  const count = impulseLength();
  const { w1, w2, weights } = impulseResponse(state, count);
  const top = Math.max(1, ...w1, ...w2) * 1.06;
  const bottom = Math.min(0, ...w1, ...w2);
  const axes = {
    x: { domain: [0, count], label: "steps since the update" },
    y: { domain: [bottom < 0 ? bottom * 1.1 : 0, Number(top.toPrecision(2))], label: "position" },
  };
  const plot = makePlot(byId("impulse"), axes);
  drawWeights(plot, weights, count);
  const points = (values) => [[0, 0], ...values.map((value, i) => [i + 1, value])];
  curve(
    plot,
    "settled",
    [
      [0, current.effectiveLrScale],
      [count, current.effectiveLrScale],
    ],
    { colour: "var(--control)", width: 1, dash: "2 4" },
  );
  curve(plot, "w1", points(w1), THIN);
  curve(plot, "w2", points(w2), THICK);
  sayImpulse(w1, w2);
}

function impulseLength() {
  if (current.halfLife === null) return 4 * state.every;
  return clamp(Math.ceil((Number.isFinite(current.halfLife) ? current.halfLife : 100) * 7), 16, 4000);
}

/** Draw how much each step of the past counts in the average, as a shade; its largest is at half height. */
function drawWeights(plot, weights, count) {
  const largest = Math.max(...weights.map(Math.abs)) || 1;
  const unit = plot.y.domain[1] / 2 / largest;
  const width = (plot.x(1) - plot.x(0)) * (count > 80 ? 1 : 0.7);
  const zero = plot.y(0);
  const stride = Math.max(1, Math.floor(weights.length / 400));
  let path = "";
  for (let i = 0; i < weights.length; i += stride) {
    const x = plot.x(i + 0.5) - width / 2;
    path += `M${x.toFixed(2)} ${zero}V${plot.y(weights[i] * unit).toFixed(1)}h${(width * stride).toFixed(2)}V${zero}z`;
  }
  mark(plot, "weights", "path", { d: path, style: "fill:var(--belay);opacity:.16" }, "ground");
}

function sayImpulse(w1, w2) {
  const first = `After an update of 1 the weights (thin) are at ${show(w1[0])}, the average (thick) at ${show(w2[0])}`;
  const scale = current.effectiveLrScale;
  const last = current.regime !== "unstable" && Number.isFinite(scale) ? `; both settle at ${show(scale)}` : "";
  const shade = "Shade: how much each step of the past counts in the average.";
  setText(byId("impulse-text"), `${first}${last}. ${memoryWords(current.halfLife)}. ${shade}`);
}

function memoryWords(half) {
  if (half === null) return `Weights and average meet every ${state.every} steps`;
  if (half === Infinity) return "The average never forgets";
  return `The distance between weights and average halves every ${steps(half)}`;
}

// Frequency response: which periods of the path the average lets through.

function renderFrequency() {
  const omegas = logSpace(2 * Math.PI * 1e-4, Math.PI, 180);
  const found = frequencyResponse(state, omegas);
  byId("frequency").style.opacity = found ? 1 : 0.25;
  if (!found) {
    setText(
      byId("frequency-text"),
      "The steps of Lookahead differ from each other, so that it has no single frequency response.",
    );
    return;
  }
  const all = [...found.w1, ...found.w2].filter((gain) => gain > 0 && Number.isFinite(gain));
  const axes = {
    x: {
      domain: [omegas[0], Math.PI * 1.0001],
      log: true,
      ticks: [1e4, 1e3, 100, 10, 2].map((period) => (2 * Math.PI) / period),
      names: ["10⁴", "1000", "100", "10", "2"],
      label: "period of a swing, in steps",
    },
    y: { domain: decades(Math.max(1e-4, Math.min(...all) * 0.9), Math.max(1, ...all)), log: true, label: "gain" },
  };
  const plot = makePlot(byId("frequency"), axes);
  const points = (gains) => omegas.map((omega, i) => [omega, gains[i]]);
  curve(
    plot,
    "one",
    [
      [omegas[0], 1],
      [Math.PI, 1],
    ],
    { colour: "var(--control)", width: 1, dash: "2 4" },
  );
  curve(plot, "w1", points(found.w1), THIN);
  curve(plot, "w2", points(found.w2), THICK);
  sayFrequency(omegas, found);
}

function sayFrequency(omegas, { w1, w2 }) {
  const left = `${show(w2.at(-1))} in the average (thick) and at ${show(w1.at(-1))} in the weights (thin)`;
  setText(byId("frequency-text"), `${cutWords(omegas, w2)}. The fastest swing, of 2 steps, is left at ${left}.`);
}

function cutWords(omegas, gains) {
  if (!(gains[0] > 0)) return "The average does not move";
  const at = omegas.findLastIndex((_, i) => gains[i] >= gains[0] / 2);
  if (at === omegas.length - 1) return "The average keeps at least half of every swing";
  return `The average halves swings of about ${show((2 * Math.PI) / omegas[at], 2)} steps, and damps faster ones more`;
}

// The race ---------------------------------------------------------------------------------------------------------
// All paths are computed when the start or a setting changes; a frame only draws the pieces between two steps. The
// contour is drawn once per function and theme.

const RACE = { steps: 2000, contour: 240, bands: 11, near: 0.01 };
// The report's colours, in the order of raceLanes: two optimizers for each. The shape of the marker doubles the colour.
const SIGNS = [
  ["belay", "circle"],
  ["ema", "square"],
  ["plain", "triangle"],
];

const race = {
  seen: false,
  stale: true,
  paths: [],
  at: 0,
  due: 0,
  drawn: 0,
  hidden: new Set(),
  travelled: [],
  domain: [1e-3, 1],
};
let raceMotion;

const raceFunction = () => functionOf(state.fn);

function planeScales() {
  const { width, height } = sizeOf(byId("plane-frame"));
  const [left, right, low, high] = raceFunction().box;
  return { x: makeScale([left, right], [0, width]), y: makeScale([low, high], [height, 0]) };
}

/** Compute all paths anew, and draw them up to the step that is shown. */
function rerunRace() {
  race.stale = false;
  race.paths = runPaths();
  race.domain = lossDomain();
  redrawRace();
  sayRace();
}
const rerunRaceSoon = once(() => {
  race.stale = !race.seen; // out of sight: later, so that sliders above stay light
  if (race.seen) rerunRace();
});

/** Return the path of every lane: points of weights and average, losses, the step of arrival and of divergence. */
function runPaths() {
  const { fn, x, y, momentum, seed } = state;
  const run = createRace({ fn, start: [x, y], lanes: raceLanes(state), momentum, seed });
  const paths = run.lanes.map(emptyPath);
  for (let step = 0; step <= RACE.steps; step++) {
    if (step) run.step();
    run.lanes.forEach((lane, i) => notePoint(paths[i], lane, step));
  }
  for (const path of paths) path.arrived = arrivalOf(path);
  return paths;
}

function emptyPath(lane, i) {
  const [colour, marker] = SIGNS[Math.floor(i / 2)];
  const points = () => new Float64Array(2 * (RACE.steps + 1));
  const losses = new Float64Array(RACE.steps + 1);
  return {
    name: lane.name,
    dashed: lane.dashed,
    colour,
    marker,
    w1: points(),
    w2: lane.w2 && points(),
    losses,
    lost: Infinity,
  };
}

function notePoint(path, lane, step) {
  if (path.lost < step) return;
  path.w1.set(lane.w1, 2 * step);
  path.w2?.set(lane.w2, 2 * step);
  path.losses[step] = lane.w2 ? lane.loss2 : lane.loss1;
  if (lane.diverged) path.lost = step;
}

/** Return the step from which on the loss stays below a hundredth of the first; null if there is none. */
function arrivalOf({ losses, lost }) {
  if (lost <= RACE.steps) return null;
  let step = RACE.steps;
  while (step >= 0 && losses[step] <= RACE.near * losses[0]) step--;
  return step === RACE.steps ? null : step + 1;
}

/** Return the range of losses that the chart shows: what was lost in rounding or in divergence is left out. */
function lossDomain() {
  const first = Math.max(race.paths[0].losses[0], 1e-12);
  let least = first;
  for (const { losses, lost } of race.paths) {
    for (let step = 0; step <= Math.min(lost, RACE.steps); step++) if (losses[step] < least) least = losses[step];
  }
  const low = Math.max(least, first * 1e-10, 1e-14);
  return [10 ** Math.floor(Math.log10(Math.min(low, first / 10))), 10 ** Math.ceil(Math.log10(first * 30))];
}

/** Run the race anew when it comes into sight, if something has changed since. */
function watchRace(entries) {
  race.seen = entries.at(-1).isIntersecting;
  if (race.seen) freshenRace();
}

function redrawRace() {
  drawContour();
  const { context, width, height } = fitCanvas(byId("trails"));
  context.clearRect(0, 0, width, height);
  drawLossAxes();
  race.drawn = 0;
  race.travelled = race.paths.map(() => [0, 0, 0]);
  drawRace();
}

/** Draw what happened since the last frame, and the heads of all paths. */
function drawRace() {
  if (race.at > race.drawn) {
    drawTrails(race.drawn, race.at);
    drawLosses(race.drawn, race.at);
    race.drawn = race.at;
  }
  drawHeads();
  drawLanes();
  drawStart();
}

/** Draw the loss as even bands of its logarithm, dark where it is high. */
function drawContour() {
  const canvas = byId("contour");
  const { context, width, height } = fitCanvas(canvas);
  const key = [raceFunction().name, colours.ink, width, devicePixelRatio].join();
  if (canvas.dataset.key === key) return;
  canvas.dataset.key = key;
  context.clearRect(0, 0, width, height);
  context.imageSmoothingEnabled = true;
  context.drawImage(contourImage(raceFunction()), 0, 0, width, height);
  const { x, y } = planeScales();
  drawCross(context, x(0), y(0));
  drawPlaneTicks(context, x, y, height);
}

/** Return round numbers of an axis that keep clear of its ends, where two axes would write over each other. */
function inside(scale) {
  const [low, high] = scale.domain;
  return roundTicks(scale.domain, 6).filter((value) => Math.min(value - low, high - value) > 0.07 * (high - low));
}

/** Write a few coordinates along the edges of the plane, inside it. */
function drawPlaneTicks(context, x, y, height) {
  context.font = canvasFont();
  context.fillStyle = colours.quiet;
  context.textAlign = "center";
  for (const value of inside(x)) context.fillText(show(value), x(value), height - 7);
  context.textAlign = "left";
  for (const value of inside(y)) context.fillText(show(value), 7, y(value) + 4);
}

const canvasFont = () => getComputedStyle(document.body).font.replace(/[\d.]+px/, "12px");

function contourImage(loss) {
  const n = RACE.contour;
  const values = sampleLoss(loss, n);
  const sorted = Float64Array.from(values).sort();
  const [low, high] = [sorted[Math.floor(n * n * 0.01)], sorted[n * n - 1]];
  const image = new ImageData(n, n);
  const [red, green, blue] = colours.ink.match(/[\d.]+/g).map(Number);
  for (let i = 0; i < n * n; i++) {
    const share = clamp((values[i] - low) / (high - low), 0, 1);
    const band = Math.floor(share * RACE.bands) / RACE.bands;
    image.data.set([red, green, blue, Math.round(88 * band)], 4 * i);
  }
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = n;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function sampleLoss(loss, n) {
  const [left, right, low, high] = loss.box;
  const values = new Float64Array(n * n);
  for (let row = 0; row < n; row++) {
    const y = mix(high, low, (row + 0.5) / n);
    for (let column = 0; column < n; column++) {
      const x = mix(left, right, (column + 0.5) / n);
      values[row * n + column] = Math.log(Math.max(1e-12, loss.value(x, y)));
    }
  }
  return values;
}

function drawCross(context, x, y) {
  context.strokeStyle = colours.ink;
  context.lineWidth = 1.25;
  strokeLine(context, [x - 6, y], [x + 6, y]);
  strokeLine(context, [x, y - 6], [x, y + 6]);
}

function drawTrails(from, to) {
  const { context } = fitCanvas(byId("trails"));
  const { x, y } = planeScales();
  race.paths.forEach((path, i) => {
    const last = Math.min(to, path.lost);
    if (race.hidden.has(i) || from >= last) return;
    const pieces = path.w2
      ? [
          [path.w1, 1, 0.5, 0],
          [path.w2, 2.6, 1, 1],
        ]
      : [[path.w1, 1, 1, 0]];
    for (const [points, thickness, opacity, which] of pieces) {
      const trail = (step) => [x(points[2 * step]), y(points[2 * step + 1])];
      drawPiece(context, path, trail, from, last, { thickness, opacity, travelled: race.travelled[i], which });
    }
  });
}

/** Draw a path from one step to another; a dashed path goes on where its last piece ended. */
function drawPiece(context, lane, place, from, to, { thickness, opacity, travelled, which }) {
  context.strokeStyle = colours[lane.colour];
  context.globalAlpha = opacity;
  context.lineWidth = thickness;
  context.lineJoin = "round";
  context.lineCap = lane.dashed ? "butt" : "round"; // pieces of a solid line must not show where they meet
  context.setLineDash(lane.dashed ? [6, 4] : []);
  context.lineDashOffset = travelled[which];
  context.beginPath();
  let [before, up] = place(from);
  context.moveTo(before, up);
  for (let step = from + 1; step <= to; step++) {
    const [across, height] = place(step).map((pixel) => clamp(pixel, -1e4, 1e4));
    travelled[which] += Math.hypot(across - before, height - up);
    context.lineTo(across, height);
    [before, up] = [across, height];
  }
  travelled[which] %= 10;
  context.stroke();
  context.setLineDash([]);
  context.globalAlpha = 1;
}

function drawHeads() {
  const { context, width, height } = fitCanvas(byId("heads"));
  context.clearRect(0, 0, width, height);
  if (race.at === 0) return;
  const { x, y } = planeScales();
  race.paths.forEach((path, i) => {
    if (race.hidden.has(i) || race.at >= path.lost) return;
    const points = path.w2 ?? path.w1;
    drawMarker(context, path, x(points[2 * race.at]), y(points[2 * race.at + 1]), 5.5);
  });
}

/** Draw the sign of a method: its shape says what is around the optimizer; it is filled for SGD, open for Adam. */
function drawMarker(context, lane, x, y, size) {
  context.beginPath();
  if (lane.marker === "circle") context.arc(x, y, size, 0, 7);
  else if (lane.marker === "square") context.rect(x - size * 0.9, y - size * 0.9, size * 1.8, size * 1.8);
  else {
    context.moveTo(x, y - size * 1.15);
    context.lineTo(x + size, y + size * 0.8);
    context.lineTo(x - size, y + size * 0.8);
    context.closePath();
  }
  context.fillStyle = lane.dashed ? colours.raised : colours[lane.colour];
  context.strokeStyle = lane.dashed ? colours[lane.colour] : colours.raised;
  context.lineWidth = lane.dashed ? 2 : 1.25;
  context.fill();
  context.stroke();
}

// Losses below the plane: both axes logarithmic, as in the report's figures.

function lossScales() {
  const { width, height } = sizeOf(byId("losses-frame"));
  return {
    x: makeScale([1, RACE.steps + 1], [46, width - 10], true),
    y: makeScale(race.domain, [height - 34, 8], true),
  };
}

function drawLossAxes() {
  const { context, width, height } = fitCanvas(byId("losses"));
  context.clearRect(0, 0, width, height);
  const { x, y } = lossScales();
  context.font = canvasFont();
  context.fillStyle = colours.quiet;
  context.strokeStyle = colours.faint;
  context.lineWidth = 1;
  context.textAlign = "right";
  for (const value of roundTicks(race.domain, (height - 42) / 36, true)) {
    strokeLine(context, [46, y(value)], [width - 10, y(value)]);
    context.fillText(tickText(value, true), 40, y(value) + 4);
  }
  context.textAlign = "center";
  for (const value of roundTicks([1, RACE.steps + 1], 6, true)) {
    strokeLine(context, [x(value), 8], [x(value), height - 34]);
    context.fillText(show(value), x(value), height - 18);
  }
  context.fillText("step + 1", (46 + width - 10) / 2, height - 3);
}

function strokeLine(context, from, to) {
  context.beginPath();
  context.moveTo(...from);
  context.lineTo(...to);
  context.stroke();
}

function drawLosses(from, to) {
  const { context, width, height } = fitCanvas(byId("losses"));
  const { x, y } = lossScales();
  context.save();
  context.beginPath();
  context.rect(46, 4, width - 56, height - 38);
  context.clip();
  race.paths.forEach((path, i) => {
    const last = Math.min(to, path.lost);
    if (race.hidden.has(i) || from >= last) return;
    const place = (step) => [x(step + 1), y(Math.max(path.losses[step], 1e-300))];
    const more = { thickness: path.w2 ? 2.2 : 1.3, opacity: 1, travelled: race.travelled[i], which: 2 };
    drawPiece(context, path, place, from, last, more);
  });
  context.restore();
}

// The desk of the race: methods, buttons, start.

function buildLanes() {
  const lanes = raceLanes(state).map(emptyPath);
  byId("lanes").tBodies[0].append(...lanes.map(laneRow));
}

function laneRow(lane, i) {
  const row = document.createElement("tr");
  const head = document.createElement("th");
  head.scope = "row";
  const label = document.createElement("label");
  const box = document.createElement("input");
  Object.assign(box, { type: "checkbox", checked: true });
  box.addEventListener("change", () => {
    if (box.checked) race.hidden.delete(i);
    else race.hidden.add(i);
    redrawRace();
  });
  label.append(box, laneSign(lane), document.createElement("span"));
  head.append(label);
  const loss = document.createElement("td");
  loss.className = "number";
  row.append(head, loss, document.createElement("td"));
  return row;
}

function laneSign(lane) {
  const svg = draw("svg", { viewBox: "0 0 42 16", "aria-hidden": true });
  const colour = `var(--${lane.colour})`;
  const thick = lane.colour === "plain" ? 1.5 : 2.6;
  const line = `stroke:${colour};stroke-width:${thick};stroke-dasharray:${lane.dashed ? "6 4" : "none"}`;
  draw("path", { d: "M1 8H41", class: "curve", style: line }, svg);
  const shape = {
    circle: "M15.5 8a5.5 5.5 0 1 0 11 0a5.5 5.5 0 1 0 -11 0",
    square: "M16 3h10v10h-10z",
    triangle: "M21 2l6 11h-12z",
  };
  const face = lane.dashed ? "var(--raised)" : colour;
  draw("path", { d: shape[lane.marker], style: `fill:${face};stroke:${colour};stroke-width:2` }, svg);
  return svg;
}

function drawLanes() {
  const rows = byId("lanes").tBodies[0].rows;
  race.paths.forEach((path, i) => {
    const lost = race.at >= path.lost;
    const [name, loss, words] = rows[i].cells;
    setText(name.querySelector("span"), path.name);
    setText(loss, lost ? "–" : show(path.losses[race.at], 3));
    setText(words, laneWords(path));
    words.classList.toggle("lost", lost);
  });
}

const hasArrived = (path) => path.arrived !== null && race.at >= path.arrived && race.at > 0;

function laneWords(path) {
  if (race.at >= path.lost) return `diverged at ${path.lost}`;
  return hasArrived(path) ? `below 1% at ${path.arrived}` : "";
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function drawStart() {
  const { x, y } = planeScales();
  const handle = byId("start");
  handle.style.left = `${x(state.x)}px`;
  handle.style.top = `${y(state.y)}px`;
  const [low, high] = x.domain;
  setSlider(handle, { now: state.x, low, high, text: `x ${show(state.x, 3)}, y ${show(state.y, 3)}` });
}

function sayRace() {
  const names = (paths) => paths.map((path) => path.name).join(", ") || "none";
  const lost = race.paths.filter((path) => race.at >= path.lost);
  const there = race.paths.filter(hasArrived);
  const { label, formula } = raceFunction();
  const words = `${label}: ${formula}. From x ${show(state.x)}, y ${show(state.y)}, step ${race.at} of ${RACE.steps}.`;
  setText(byId("race-text"), `${words} Below 1% of the first loss: ${names(there)}. Diverged: ${names(lost)}.`);
}

function advanceRace(seconds) {
  race.due += seconds * state.speed;
  const whole = Math.floor(race.due);
  race.due -= whole;
  return walkRace(whole);
}

/** Go on by some steps; return whether there are more. */
function walkRace(count) {
  race.at = Math.min(RACE.steps, race.at + count);
  drawRace();
  sayRace();
  const goesOn = race.at < RACE.steps;
  if (!goesOn) queueMicrotask(drawRaceButtons);
  return goesOn;
}

function drawRaceButtons() {
  const running = raceMotion.running;
  setText(byId("race-run"), running ? "Pause" : race.at >= RACE.steps ? "Run again" : "Run");
  byId("race-step").disabled = race.at >= RACE.steps;
  sayRace();
  if (!running) setText(byId("live"), byId("race-text").textContent); // not at every frame
}

function resetRace() {
  raceMotion.stop();
  race.at = race.due = 0;
  redrawRace();
  drawRaceButtons();
}

/** Run the race anew if something has changed while it was out of sight. */
function freshenRace() {
  if (race.stale) rerunRace();
}

function toggleRace() {
  freshenRace();
  if (raceMotion.running) raceMotion.stop();
  else {
    if (race.at >= RACE.steps) resetRace();
    // without motion, a run is one picture: the whole of it
    if (stillness.matches) walkRace(RACE.steps - race.at);
    else raceMotion.start();
  }
  drawRaceButtons();
}

/** Start from a point of the plane, in pixels, and keep it inside the plane. */
function startAt(pixelX, pixelY) {
  const { x, y } = planeScales();
  const [left, right, low, high] = raceFunction().box;
  const digits = (value) => Number(value.toFixed(3));
  update({ x: digits(clamp(x.invert(pixelX), left, right)), y: digits(clamp(y.invert(pixelY), low, high)) });
}

function buildRace() {
  buildLanes();
  buildFunctions();
  raceMotion = makeMotion(advanceRace);
  makeDraggable(byId("plane-frame"), byId("plane-frame"), { move: startAt, hand: "start" });
  makeKeyable(byId("start"), (across, up) => {
    const { x, y } = planeScales();
    const frame = sizeOf(byId("plane-frame"));
    startAt(x(state.x) + (across * frame.width) / 100, y(state.y) - (up * frame.height) / 100);
  });
  new IntersectionObserver(watchRace, { rootMargin: "200px" }).observe(byId("race"));
  byId("race-run").addEventListener("click", toggleRace);
  byId("race-reset").addEventListener("click", resetRace);
  byId("race-step").addEventListener("click", () => {
    raceMotion.stop();
    freshenRace();
    walkRace(1);
    drawRaceButtons();
  });
}

function buildFunctions() {
  for (const { name, label } of FUNCTIONS) {
    const words = document.createElement("label");
    const input = document.createElement("input");
    Object.assign(input, { type: "radio", name: "function", value: name });
    input.addEventListener("change", () => chooseFunction(name));
    words.append(input, label);
    byId("functions").append(words);
  }
}

/** Race on another function, from its own start at its own rate; the figures above take over its curvature. */
function chooseFunction(name) {
  const { start, lr, curvature } = functionOf(name);
  raceMotion.stop();
  race.at = race.due = 0;
  update({ fn: name, x: start[0], y: start[1], lr, curvature: curvature ?? state.curvature });
  drawRaceButtons();
}

function renderRaceControls() {
  for (const input of byId("functions").querySelectorAll("input")) input.checked = input.value === state.fn;
}

// Taking it home ---------------------------------------------------------------------------------------------------

let addressTimer = 0;

/** Write the setting into the address once the hand rests: browsers refuse to write it at every frame. */
function writeAddressLater() {
  clearTimeout(addressTimer);
  addressTimer = setTimeout(writeAddress, 300);
}

function writeAddress() {
  clearTimeout(addressTimer);
  const wanted = toHash(state) || "#";
  if (location.hash === wanted || (wanted === "#" && location.hash === "")) return;
  history.replaceState(null, "", wanted);
}

/** Show the setting of the address; one that makes no method is answered with its problem and changes nothing. */
function readAddress() {
  update(fromHash(location.hash));
}

async function copyText(text, words) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text); // some browsers keep the clipboard from pages on disk
  }
  setText(byId("copied"), words);
  setTimeout(() => setText(byId("copied"), ""), 4000);
}

function copyBySelection(text) {
  const field = document.createElement("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

function buildTakeHome() {
  byId("copy").addEventListener("click", () => copyText(toPython(state), "The program is copied."));
  byId("share").addEventListener("click", () => {
    writeAddress();
    copyText(location.href, "The address is copied.");
  });
}

// Light and dark ---------------------------------------------------------------------------------------------------

const THEME = "torchbelay-explorer-theme";
const darkness = typeof matchMedia === "function" ? matchMedia("(prefers-color-scheme: dark)") : null;
const isDark = () => (document.documentElement.dataset.theme ?? (darkness.matches ? "dark" : "light")) === "dark";

function remembered() {
  try {
    return localStorage.getItem(THEME);
  } catch {
    return null; // a browser may refuse storage to pages on disk
  }
}

function remember(theme) {
  try {
    localStorage.setItem(THEME, theme);
  } catch {
    // then the choice holds for this visit
  }
}

function applyTheme(theme) {
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  setText(byId("theme"), isDark() ? "Light" : "Dark");
  byId("theme").setAttribute("aria-label", `Show the page ${isDark() ? "light" : "dark"}`);
  colours = readColours(COLOURS);
}

function buildTheme() {
  applyTheme(remembered());
  byId("theme").addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    remember(theme);
    applyTheme(theme);
    renderAll();
  });
  darkness.addEventListener("change", () => {
    applyTheme();
    renderAll();
  });
}

// Start ------------------------------------------------------------------------------------------------------------

function render() {
  renderControls();
  renderPresets();
  renderNumbers();
  renderLocus();
  renderEdge();
  sayLocus();
  renderNoise();
  renderImpulse();
  renderFrequency();
  renderRaceControls();
  setText(byId("python"), toPython(state));
  setStageRate();
  drawStage();
  drawStageButtons();
}
const renderSoon = once(render);

function renderAll() {
  render();
  redrawRace();
}

/** Begin with the address's setting if it is one, else with the paper's. */
function firstState() {
  const wanted = fromHash(location.hash);
  return problem(wanted) === null ? wanted : { ...DEFAULT };
}

function start() {
  byId("no-script").remove();
  byId("main").hidden = false;
  state = firstState();
  current = analyze(state);
  buildTheme();
  buildControls();
  buildPresets();
  buildStage();
  buildLocus();
  buildRace();
  buildTakeHome();
  pluck();
  render();
  rerunRace();
  drawRaceButtons();
  addEventListener("hashchange", readAddress);
  watchSizes();
  stillness.addEventListener("change", quietDown);
  if (!stillness.matches) startStage();
}

/** Draw everything anew when the page becomes wider or narrower; a longer text changes its height alone. */
function watchSizes() {
  let width = byId("main").clientWidth;
  const redraw = once(() => {
    sizes = new WeakMap();
    renderAll();
  });
  new ResizeObserver(() => {
    if (byId("main").clientWidth === width) return;
    width = byId("main").clientWidth;
    redraw();
  }).observe(byId("main"));
}

/** Stop all motion when a reader asks for stillness. */
function quietDown() {
  runStage(false);
  raceMotion.stop();
  drawRaceButtons();
}

if (typeof document !== "undefined") start();
