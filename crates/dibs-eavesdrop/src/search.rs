//! The search for the first bytes of the chains that make text of all of them.

use std::collections::HashSet;
use std::ops::Range;

use crate::chains::{CHAINS, Chains, Keys};
use crate::model::{ByContext, Context, Costs, Model, ORDER};

/// Keys of a column that the last step looks at closely.
const CLOSELY: usize = 16;
/// How often the last step goes over all columns.
const ROUNDS: usize = 4;
/// So many bits more a plaintext may cost whose chains fit together (see [`Chains::misfit`]).
const FIT: f32 = 30.0;
/// Bytes of random data cost more than this each, chain by chain and without contexts, those of text less.
const HOPELESS: f32 = 7.0;
/// That is so of chains of as many bytes.
const LONG: usize = 12;

/// What is searched for, and in what.
pub(crate) struct Search<'a> {
    /// What text looks like.
    pub(crate) model: &'a Model,
    /// The run.
    pub(crate) chains: &'a Chains,
    /// Where text stands in it.
    pub(crate) text: Range<usize>,
    /// Chains that are known.
    pub(crate) fixed: [Option<u8>; CHAINS],
}

/// Keys of some columns side by side, and what stands in them.
struct Partial {
    cost: f32,
    keys: Keys,
    /// What stands in front of the next column in each row.
    contexts: Vec<Context>,
}

impl Search<'_> {
    /// The likeliest keys that were found; none where there cannot be text.
    pub(crate) fn best(&self, width: usize) -> Option<Keys> {
        if self.is_hopeless() {
            return None;
        }
        let mut best = self.beam(0, None, width);
        // From the middle of what is known now, and once around, each row knows what stands in front of it.
        for first in [CHAINS / 2, 0] {
            let other = self.beam(first, Some(&best), width);
            if self.cost(&other) < self.cost(&best) {
                best = other;
            }
        }
        self.climb(&mut best);
        self.fit(&mut best);
        Some(best)
    }

    /// Bits that the text takes.
    pub(crate) fn cost(&self, keys: &Keys) -> f32 {
        let mut context = Context::default();
        let mut sum = 0.0;
        for at in self.text.clone() {
            let byte = self.byte(keys, at);
            sum += self.model.cost(context, byte);
            context = context.then(byte);
        }
        sum
    }

    /// By how many bits the likeliest other key of a column is worse.
    pub(crate) fn margin(&self, keys: &Keys, column: usize) -> f32 {
        if self.fixed[column].is_some() {
            return f32::INFINITY;
        }
        let costs = self.column(keys, column, CLOSELY);
        let (own, others): (Vec<_>, Vec<_>) =
            costs.into_iter().partition(|(_, key)| *key == keys[column]);
        let of = |costs: &[(f32, u8)]| costs.first().map_or(f32::INFINITY, |(cost, _)| *cost);
        of(&others) - of(&own)
    }

    fn byte(&self, keys: &Keys, at: usize) -> u8 {
        self.chains.relative(at) ^ keys[at % CHAINS]
    }

    fn context(&self, keys: &Keys, at: usize) -> Context {
        let from = at.saturating_sub(ORDER).max(self.text.start);
        let bytes = (from..at).map(|at| self.byte(keys, at));
        bytes.fold(Context::default(), Context::then)
    }

    /// Where the text meets a column.
    fn rows(&self, column: usize) -> impl Iterator<Item = usize> {
        let all = (column..self.text.end).step_by(CHAINS);
        all.skip_while(|at| *at < self.text.start)
    }

    /// What each key of a column costs without regard to what stands beside it, or behind it.
    fn sums(&self, column: usize, context: impl Fn(usize) -> Context) -> Costs {
        let mut sums = [0.0; 256];
        for at in self.rows(column) {
            let costs = self.model.costs(context(at));
            add(&mut sums, &costs, self.chains.relative(at));
        }
        sums
    }

    fn is_hopeless(&self) -> bool {
        if self.text.len() < LONG * CHAINS {
            return false;
        }
        let least = |column: usize| {
            let sums = self.sums(column, |_| Context::default());
            sums.into_iter().fold(f32::INFINITY, f32::min)
        };
        let all: f32 = (0..CHAINS).map(least).sum();
        all > HOPELESS * self.text.len() as f32
    }

    /// Column by column from `first` on, the `width` likeliest keys of all columns so far. With `start`, what stands in
    /// front of the first column is what these keys make of it.
    fn beam(&self, first: usize, start: Option<&Keys>, width: usize) -> Keys {
        let (turn, first) = (CHAINS as isize, first as isize);
        let end = self.text.end as isize;
        let rows: Vec<isize> = (-1..)
            .map(|row| first + row * turn)
            .take_while(|at| *at < end)
            .collect();
        let in_front = |at: &isize| match (start, usize::try_from(*at)) {
            (Some(keys), Ok(at)) if at > self.text.start => self.context(keys, at),
            _ => Context::default(),
        };
        let mut beam = vec![Partial {
            cost: 0.0,
            keys: start.copied().unwrap_or([0; CHAINS]),
            contexts: rows.iter().map(in_front).collect(),
        }];
        let mut known: ByContext<Box<Costs>> = ByContext::default();
        for step in 0..CHAINS {
            known.clear();
            let column = (first as usize + step) % CHAINS;
            let here: Vec<(usize, u8)> = { rows.iter().enumerate() }
                .filter_map(|(row, at)| {
                    let at = usize::try_from(at + step as isize).ok()?;
                    let text = self.text.contains(&at);
                    text.then(|| (row, self.chains.relative(at)))
                })
                .collect();
            let mut all = Vec::with_capacity(beam.len() * 256);
            for (number, partial) in beam.iter().enumerate() {
                let mut sums = [partial.cost; 256];
                for &(row, relative) in &here {
                    let context = partial.contexts[row];
                    let costs = known
                        .entry(context)
                        .or_insert_with(|| Box::new(self.model.costs(context)));
                    add(&mut sums, costs, relative);
                }
                match self.fixed[column] {
                    Some(key) => all.push((sums[usize::from(key)], number, key)),
                    None => {
                        let keys = (0u8..=255).zip(sums);
                        all.extend(keys.map(|(key, cost)| (cost, number, key)));
                    }
                }
            }
            beam = self.keep(&beam, all, column, step, &here, width);
        }
        beam.swap_remove(0).keys
    }

    /// The likeliest of the next step; of those that have the same last keys, and so the same future, the first.
    fn keep(
        &self,
        beam: &[Partial],
        mut all: Vec<(f32, usize, u8)>,
        column: usize,
        step: usize,
        here: &[(usize, u8)],
        width: usize,
    ) -> Vec<Partial> {
        let some = 2 * width;
        if all.len() > some {
            all.select_nth_unstable_by(some, |a, b| a.0.total_cmp(&b.0));
            all.truncate(some);
        }
        all.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let mut seen = HashSet::new();
        let mut next = Vec::with_capacity(width);
        for (cost, number, key) in all {
            let parent = &beam[number];
            let mut keys = parent.keys;
            keys[column] = key;
            let latest: [u8; ORDER] =
                std::array::from_fn(|back| keys[(column + CHAINS - back.min(step)) % CHAINS]);
            if !seen.insert(latest) {
                continue;
            }
            let mut contexts = parent.contexts.clone();
            for &(row, relative) in here {
                contexts[row] = contexts[row].then(relative ^ key);
            }
            next.push(Partial {
                cost,
                keys,
                contexts,
            });
            if next.len() == width {
                break;
            }
        }
        next
    }

    /// What the likeliest keys of a column cost in it and behind it, the other columns being as they are; the least
    /// first. The present one is among them.
    fn column(&self, keys: &Keys, column: usize, most: usize) -> Vec<(f32, u8)> {
        let sums = self.sums(column, |at| self.context(keys, at));
        let mut likeliest: Vec<u8> = (0..=255).collect();
        likeliest.sort_by(|a, b| sums[usize::from(*a)].total_cmp(&sums[usize::from(*b)]));
        likeliest.truncate(most);
        if !likeliest.contains(&keys[column]) {
            likeliest.push(keys[column]);
        }
        let all = likeliest.into_iter();
        let mut all: Vec<_> = all
            .map(|key| {
                let sum = sums[usize::from(key)] + self.behind(keys, column, key);
                (sum, key)
            })
            .collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        all
    }

    /// What the bytes behind a column cost if it has this key.
    fn behind(&self, keys: &Keys, column: usize, key: u8) -> f32 {
        let mut keys = *keys;
        keys[column] = key;
        let mut sum = 0.0;
        for at in self.rows(column) {
            let mut context = self.context(&keys, at + 1);
            for at in at + 1..(at + 1 + ORDER).min(self.text.end) {
                let byte = self.byte(&keys, at);
                sum += self.model.cost(context, byte);
                context = context.then(byte);
            }
        }
        sum
    }

    /// Changes one column at a time for the better, until none can be.
    fn climb(&self, keys: &mut Keys) {
        for _ in 0..ROUNDS {
            let before = *keys;
            for column in (0..CHAINS).filter(|column| self.fixed[*column].is_none()) {
                keys[column] = self.column(keys, column, CLOSELY)[0].1;
            }
            if *keys == before {
                break;
            }
        }
    }

    /// If one column does not fit the others, changes that which costs the least.
    fn fit(&self, keys: &mut Keys) {
        let misfit = self.chains.misfit(keys);
        if misfit == 0 {
            return;
        }
        let cost = self.cost(keys);
        let open = (0..CHAINS).filter(|column| self.fixed[*column].is_none());
        let changed = open.map(|column| {
            let mut other = *keys;
            other[column] ^= misfit;
            (self.cost(&other), other)
        });
        let least = changed.min_by(|a, b| a.0.total_cmp(&b.0));
        if let Some((other, changed)) = least
            && other < cost + FIT
        {
            *keys = changed;
        }
    }
}

/// Adds what each key costs if it makes text of this byte.
fn add(sums: &mut Costs, costs: &Costs, relative: u8) {
    for (key, sum) in sums.iter_mut().enumerate() {
        *sum += costs[key ^ usize::from(relative)];
    }
}
