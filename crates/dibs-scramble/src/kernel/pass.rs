//! A pass over the data, from one slice to another or in place, cut into blocks.

use crate::{BUFFER_LEN, window::Window};

pub(crate) type Block = [u8; BUFFER_LEN];

/// Where a kernel reads and writes. A block is read before it is written, and never after.
pub(crate) trait Pass {
    /// The number of whole blocks.
    fn blocks(&self) -> usize;
    fn src(&self, block: usize) -> &Block;
    fn dst(&mut self, block: usize) -> &mut Block;
    /// What is left after the whole blocks: fewer bytes than a block, as many in `dst_rest`.
    fn src_rest(&self) -> &[u8];
    fn dst_rest(&mut self) -> &mut [u8];
}

/// From one slice to another of the same length.
pub(crate) struct Across<'a> {
    src: (&'a [Block], &'a [u8]),
    dst: (&'a mut [Block], &'a mut [u8]),
}

impl<'a> Across<'a> {
    #[inline(always)]
    pub(crate) fn new(src: &'a [u8], dst: &'a mut [u8]) -> Self {
        assert_eq!(
            src.len(),
            dst.len(),
            "source and destination of a pass have the same length"
        );
        Self {
            src: src.as_chunks(),
            dst: dst.as_chunks_mut(),
        }
    }
}

impl Pass for Across<'_> {
    #[inline(always)]
    fn blocks(&self) -> usize {
        self.src.0.len()
    }

    #[inline(always)]
    fn src(&self, block: usize) -> &Block {
        &self.src.0[block]
    }

    #[inline(always)]
    fn dst(&mut self, block: usize) -> &mut Block {
        &mut self.dst.0[block]
    }

    #[inline(always)]
    fn src_rest(&self) -> &[u8] {
        self.src.1
    }

    #[inline(always)]
    fn dst_rest(&mut self) -> &mut [u8] {
        self.dst.1
    }
}

/// In one slice.
pub(crate) struct InPlace<'a> {
    blocks: &'a mut [Block],
    rest: &'a mut [u8],
}

impl<'a> InPlace<'a> {
    #[inline(always)]
    pub(crate) fn new(buf: &'a mut [u8]) -> Self {
        let (blocks, rest) = buf.as_chunks_mut();
        Self { blocks, rest }
    }
}

impl Pass for InPlace<'_> {
    #[inline(always)]
    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    #[inline(always)]
    fn src(&self, block: usize) -> &Block {
        &self.blocks[block]
    }

    #[inline(always)]
    fn dst(&mut self, block: usize) -> &mut Block {
        &mut self.blocks[block]
    }

    #[inline(always)]
    fn src_rest(&self) -> &[u8] {
        self.rest
    }

    #[inline(always)]
    fn dst_rest(&mut self) -> &mut [u8] {
        self.rest
    }
}

/// Scrambles the rest of a pass as a padded block: no byte of the output depends on a later one of
/// the input.
#[inline(always)]
pub(super) fn scramble_rest(
    window: &mut Window,
    pass: &mut impl Pass,
    scramble: impl FnOnce(&mut Window, InPlace<'_>),
) {
    if let Some((plain, n)) = padded(pass.src_rest()) {
        let mut sent = plain;
        scramble(&mut window.clone(), InPlace::new(&mut sent));
        pass.dst_rest().copy_from_slice(&sent[..n]);
        window.advance(&plain, &sent, n);
    }
}

/// Descrambles the rest of a pass as a padded block.
#[inline(always)]
pub(super) fn descramble_rest(
    window: &mut Window,
    pass: &mut impl Pass,
    descramble: impl FnOnce(&mut Window, InPlace<'_>),
) {
    if let Some((sent, n)) = padded(pass.src_rest()) {
        let mut plain = sent;
        descramble(&mut window.clone(), InPlace::new(&mut plain));
        pass.dst_rest().copy_from_slice(&plain[..n]);
        window.advance(&plain, &sent, n);
    }
}

#[inline(always)]
fn padded(rest: &[u8]) -> Option<(Block, usize)> {
    let mut block = [0; BUFFER_LEN];
    block[..rest.len()].copy_from_slice(rest);
    (!rest.is_empty()).then_some((block, rest.len()))
}
