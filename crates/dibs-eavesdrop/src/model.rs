//! How likely a byte is behind others: frequencies of bytes in contexts of up to five bytes, taken from texts.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// The longest context, in bytes.
pub(crate) const ORDER: usize = 5;
/// What each count in a context gives up to bytes that were not seen there.
const DISCOUNT: f32 = 0.6;
/// Bytes that stand where no text had them: how much of each guess is left to them.
const FLOOR: f32 = 1e-4;

/// Costs of all bytes in some context, in bits.
pub(crate) type Costs = [f32; 256];

/// By contexts; their hash is a product, for each is looked up often, and nobody chooses them to collide.
pub(crate) type ByContext<T> = HashMap<Context, T, BuildHasherDefault<Product>>;

/// The last bytes before one, the newest in the lowest place, and how many are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Context {
    bytes: u64,
    known: u8,
}

/// Frequencies of bytes in contexts.
pub(crate) struct Model {
    nodes: ByContext<Node>,
    lowest: [f32; 256],
}

/// What was seen behind a context.
#[derive(Default)]
struct Node {
    total: u32,
    counts: Vec<(u8, u32)>,
}

impl Hash for Context {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.bytes | u64::from(self.known) << 56);
    }
}

/// Hashes one number by multiplication.
#[derive(Default)]
pub(crate) struct Product(u64);

impl Hasher for Product {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        let product = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ (product >> 32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl Context {
    /// The context behind one more byte.
    pub(crate) fn then(self, byte: u8) -> Self {
        Self {
            bytes: ((self.bytes << 8) | u64::from(byte)) & ((1 << (8 * ORDER)) - 1),
            known: (self.known + 1).min(ORDER as u8),
        }
    }

    /// Its newest bytes.
    fn newest(self, count: usize) -> Self {
        Self {
            bytes: self.bytes & ((1u64 << (8 * count)) - 1),
            known: count as u8,
        }
    }
}

impl Model {
    /// Counts what stands in texts, behind contexts of up to `order` bytes.
    pub(crate) fn of(texts: &[&[u8]], order: usize) -> Self {
        let mut nodes: ByContext<Node> = ByContext::default();
        for text in texts {
            let mut context = Context::default();
            for &byte in *text {
                for order in 0..=usize::from(context.known).min(order) {
                    nodes.entry(context.newest(order)).or_default().add(byte);
                }
                context = context.then(byte);
            }
        }
        Self {
            nodes,
            lowest: [1.0 / 256.0; 256],
        }
    }

    /// What each byte costs behind `context`.
    pub(crate) fn costs(&self, context: Context) -> Costs {
        let mut guess = self.lowest;
        for order in 0..=usize::from(context.known) {
            match self.nodes.get(&context.newest(order)) {
                Some(node) => node.sharpen(&mut guess),
                None => break,
            }
        }
        guess.map(bits)
    }

    /// What `byte` costs behind `context`.
    pub(crate) fn cost(&self, context: Context, byte: u8) -> f32 {
        let mut chance = self.lowest[usize::from(byte)];
        for order in 0..=usize::from(context.known) {
            match self.nodes.get(&context.newest(order)) {
                Some(node) => chance = node.sharpened(chance, byte),
                None => break,
            }
        }
        bits(chance)
    }
}

/// What a byte of this chance costs. The logarithm is a polynomial's, to a hundredth of a bit: the compiler makes one
/// loop of vectors of it for all bytes.
fn bits(chance: f32) -> f32 {
    let number = (chance * (1.0 - FLOOR) + FLOOR / 256.0).to_bits();
    let exponent = (number >> 23) as f32 - 127.0;
    let mantissa = f32::from_bits((number & 0x007f_ffff) | 0x3f80_0000);
    let fraction = ((0.152_7 * mantissa - 1.026_8) * mantissa + 3.011_2) * mantissa - 2.136_3;
    -(exponent + fraction)
}

impl Node {
    fn add(&mut self, byte: u8) {
        self.total += 1;
        match self.counts.iter_mut().find(|(seen, _)| *seen == byte) {
            Some((_, count)) => *count += 1,
            None => self.counts.push((byte, 1)),
        }
    }

    /// What is left to bytes that were not seen here.
    fn rest(&self) -> f32 {
        DISCOUNT * self.counts.len() as f32 / self.total as f32
    }

    fn sharpen(&self, guess: &mut [f32; 256]) {
        let rest = self.rest();
        for chance in guess.iter_mut() {
            *chance *= rest;
        }
        for &(byte, count) in &self.counts {
            guess[usize::from(byte)] += (count as f32 - DISCOUNT) / self.total as f32;
        }
    }

    fn sharpened(&self, chance: f32, byte: u8) -> f32 {
        let own = self.counts.iter().find(|(seen, _)| *seen == byte);
        let own = own.map_or(0.0, |(_, count)| *count as f32 - DISCOUNT);
        chance * self.rest() + own / self.total as f32
    }
}
