//! `scramble`: each byte XORed with the 64 before it (Kato et al. 2017, 2018, 2019).

use std::sync::Arc;

use dibs_scramble::{BUFFER_LEN, Descrambler, Scrambler, initial_buffer};
use dibs_settings::BumpId;

use super::{Bump, Chain, Decode, Encode, Method};
use crate::session::EpochKey;

/// Number of [`scramble`].
pub const SCRAMBLE: BumpId = BumpId::SCRAMBLE;

/// The papers' scrambler.
pub fn scramble() -> Bump {
    Bump {
        number: SCRAMBLE,
        method: Method::Chain(Arc::new(Scramble)),
    }
}

/// The papers' scrambler.
#[derive(Debug)]
pub struct Scramble;

impl Chain for Scramble {
    fn guarded(&self) -> u64 {
        // With the zeros of the initial buffer these give the next ones away (docs/threat-model.md).
        BUFFER_LEN as u64 + 1
    }

    fn encoder(&self, key: &EpochKey) -> Box<dyn Encode> {
        Box::new(Scrambler::new(&initial_buffer(&key.initial_mac())))
    }

    fn decoder(&self, key: &EpochKey) -> Box<dyn Decode> {
        Box::new(Descrambler::new(&initial_buffer(&key.initial_mac())))
    }
}

impl Encode for Scrambler {
    fn encode(&mut self, plain: &[u8], out: &mut [u8]) {
        self.scramble(plain, out);
    }

    fn encode_summed(&mut self, plain: &[u8], out: &mut [u8]) -> u32 {
        self.scramble_summed(plain, out)
    }
}

impl Decode for Descrambler {
    fn decode(&mut self, sent: &[u8], plain: &mut [u8]) {
        self.descramble(sent, plain);
    }

    fn decode_summed(&mut self, sent: &[u8], plain: &mut [u8]) -> u32 {
        self.descramble_summed(sent, plain)
    }

    fn advance(&mut self, plain: &[u8]) {
        Descrambler::advance(self, plain);
    }
}
