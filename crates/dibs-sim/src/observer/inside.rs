//! What datagrams hold: the observer has the keys of all sessions and opens copies. So that what must not
//! be there is looked for where it would be, not only where it would show.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use dibs_core::bump::{Padding, SCRAMBLE, SEAL, SHARE};
use dibs_core::session::Tap;
use dibs_settings::BumpId;
use dibs_wire::frame::{Chunk, FlowId, Frame, Frames, Open, Share};

use super::digest;
use crate::coverage::{Coverage, Seen};
use crate::history::Setup;

/// Bytes of a share that are compared with those of all others.
const BLOCK: usize = 16;
/// Up to here, lengths of what is padded are powers of two.
const LARGEST_BUCKET: usize = 1024;

/// Who sends to whom: the host, the instance of its daemon, and that of the other one.
type Ends = (usize, u64, u64);

/// A datagram on its way.
#[derive(Clone, Copy)]
pub(super) struct Passing {
    pub(super) from: usize,
    pub(super) path: usize,
    pub(super) trusted: bool,
}

/// What a datagram turned out to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Held {
    /// Its payload is of a chain, which is not encrypted.
    pub(crate) chained: bool,
    /// Something of it is of a bump whose datagrams are encrypted whole.
    pub(crate) sealed: bool,
    /// It carries something of what a kernel sent.
    pub(crate) payload: bool,
    /// Of what is encrypted whole it carries something that was not sent before, of a flow that is open.
    pub(crate) fresh: bool,
    /// It carries a share that was not sent before.
    pub(crate) split: bool,
}

/// A share that was seen.
#[derive(Clone, Copy)]
struct Known {
    path: usize,
    content: u64,
    begins: [u8; BLOCK],
}

/// Pieces of what was cut for a path.
#[derive(Default)]
struct Cut {
    paths: BTreeSet<usize>,
    parts: BTreeMap<u32, Vec<u8>>,
    share: Option<Share>,
    sealed: bool,
}

/// All that was seen inside.
#[derive(Default)]
pub(super) struct Inside {
    /// How many of how many shares give the whole.
    scheme: (u8, u8),
    /// Untrusted paths may carry what chains must hide.
    lax: bool,
    /// Only a few lengths may show of what is encrypted whole.
    padded: bool,
    taps: HashMap<(usize, u32), Tap>,
    /// The instance of a host's daemon that a session is of.
    instances: HashMap<(u64, usize), u64>,
    /// The bump of each flow: a flow's number is never another one's.
    flows: HashMap<(usize, u64, FlowId), BumpId>,
    /// How far each flow's encrypted stream has been sent, by its incarnation.
    tops: HashMap<(usize, u64, FlowId, u16), u64>,
    sets: HashMap<(Ends, u32), [Option<Known>; 3]>,
    /// Sets that are being sent.
    fresh: BTreeSet<(Ends, u32)>,
    cuts: HashMap<(Ends, u32), Cut>,
    /// Parts of shares, and what is random in pairs of them: nothing comes twice by chance.
    blocks: HashMap<[u8; BLOCK], (Ends, u32)>,
    pub(super) seen: Coverage,
}

impl Inside {
    pub(super) fn new(setup: &Setup) -> Self {
        Self {
            scheme: setup.share,
            lax: !setup.hold_without_trusted,
            padded: setup.padding == Padding::Buckets,
            ..Self::default()
        }
    }

    /// A session of a host's daemon came about.
    pub(super) fn tap(&mut self, host: usize, instance: u64, tap: Tap) {
        let session = tap.session().as_u64();
        self.instances.insert((session, host), instance);
        self.taps.insert((host, tap.index()), tap);
    }

    /// Looks into a datagram.
    ///
    /// # Errors
    /// What must not be there, or not by this path.
    pub(super) fn see(&mut self, passing: Passing, datagram: &[u8]) -> Result<Held, String> {
        let from = passing.from;
        let index = u32::from_be_bytes(datagram[4..8].try_into().expect("four bytes"));
        let tap = self.taps.get_mut(&(from, index));
        let tap = tap.ok_or("a datagram of no session")?;
        let session = tap.session().as_u64();
        let mut copy = datagram.to_vec();
        let opened = tap.open(&mut copy);
        let opened = opened.map_err(|error| format!("a datagram that does not open: {error}"))?;
        let instance = |host| self.instances.get(&(session, host)).copied();
        let (Some(own), Some(theirs)) = (instance(from), instance(1 - from)) else {
            return Err("a datagram of a session that one end does not know".into());
        };
        let ends = (from, own, theirs);
        let mut held = Held::default();
        for frame in Frames::new(opened.header) {
            let frame = frame.map_err(|error| format!("a frame was sent that is none: {error}"))?;
            match frame {
                Frame::Chunk(chunk) => {
                    let bump = self.flow(ends, chunk.flow, chunk.open.as_ref())?;
                    held.chained = bump == SCRAMBLE;
                    held.sealed |= bump == SEAL;
                    held.payload = true;
                    if bump == SEAL {
                        let end = chunk.offset + opened.payload.len() as u64;
                        let flow = (from, own, chunk.flow, chunk.incarnation);
                        let top = self.tops.entry(flow).or_default();
                        // One without payload is a FIN, which stands where it stood when it is sent again.
                        let new = chunk.offset >= *top && !opened.payload.is_empty();
                        held.fresh = new && chunk.open.is_none();
                        *top = end.max(*top);
                    }
                    self.take_chunk(passing, bump, &chunk, opened.payload_inside)?;
                }
                Frame::Segment(segment) => {
                    let bump = self.flow(ends, segment.flow, segment.open.as_ref())?;
                    held.sealed |= bump == SEAL;
                    not_split(bump, "a segment")?;
                }
                Frame::Opaque { bump, .. } => {
                    let bump = named(bump)?;
                    held.sealed |= bump == SEAL;
                    not_split(bump, "an opaque packet")?;
                }
                Frame::Share(share) => {
                    held.payload = true;
                    held.split |= self.take_share(ends, passing.path, share, opened.payload)?;
                }
                Frame::Fragment {
                    id,
                    at,
                    total,
                    header,
                    bytes,
                } => {
                    let piece = (id, at, total, header);
                    held.payload = true;
                    held.sealed |= self.take_piece(ends, passing.path, piece, bytes)?;
                }
                _ => {}
            }
        }
        let len = datagram.len();
        if held.sealed && self.padded && len <= LARGEST_BUCKET && !len.is_power_of_two() {
            return Err(format!("a padded datagram of {len} bytes"));
        }
        Ok(held)
    }

    /// Everything has been sent that can be: with too few paths no share leaves.
    ///
    /// # Errors
    /// A set has fewer shares than it takes.
    pub(super) fn settle(&mut self) -> Result<(), String> {
        for of in std::mem::take(&mut self.fresh) {
            let shares = self.sets[&of].iter().flatten().count();
            if shares < usize::from(self.scheme.0) {
                return Err(format!("set {} was sent as {shares} shares", of.1));
            }
        }
        Ok(())
    }

    /// The bump of a flow.
    fn flow(
        &mut self,
        (from, own, _): Ends,
        flow: FlowId,
        open: Option<&Open>,
    ) -> Result<BumpId, String> {
        let key = (from, own, flow);
        if let Some(open) = open {
            let bump = named(open.bump)?;
            let before = self.flows.insert(key, bump);
            if before.is_some_and(|before| before != bump) {
                return Err(format!("flow {flow} changed its bump"));
            }
        }
        let known = self.flows.get(&key).copied();
        known.ok_or_else(|| format!("flow {flow} was never opened"))
    }

    fn take_chunk(
        &mut self,
        passing: Passing,
        bump: BumpId,
        chunk: &Chunk<'_>,
        inside: bool,
    ) -> Result<(), String> {
        let path = passing.path;
        not_split(bump, "a chunk")?;
        if inside != (bump == SEAL) {
            return Err(format!(
                "a chunk of bump {bump} on path {path}: encrypted {inside}"
            ));
        }
        if bump == SEAL {
            self.seen.note(Seen::Sealed);
            if passing.trusted {
                self.seen.note(Seen::SealedTrusted);
            }
            return Ok(());
        }
        self.seen.note(Seen::Chained);
        if chunk.solo && !passing.trusted && !self.lax {
            return Err(format!("a solo chunk on untrusted path {path}"));
        }
        Ok(())
    }

    /// Each share of a set takes a path of its own, and always that one, with the same bytes. Whether it is the
    /// first time.
    fn take_share(
        &mut self,
        ends: Ends,
        path: usize,
        share: Share,
        bytes: &[u8],
    ) -> Result<bool, String> {
        let (set, index) = (share.set, usize::from(share.index));
        if (share.needed, share.shares) != self.scheme || share.index >= share.shares {
            return Err(format!("{share:?} is of another scheme"));
        }
        let Some((begins, ends_in)) = bytes.first_chunk().zip(bytes.last_chunk()) else {
            return Err(format!("{share:?} has only {} bytes", bytes.len()));
        };
        let content = digest(bytes);
        let shares = self.sets.entry((ends, set)).or_default();
        if let Some(known) = shares[index] {
            self.seen.note(Seen::ShareAgain);
            return match (known.path == path, known.content == content) {
                (false, _) => Err(format!(
                    "share {index} of set {set} took path {} and {path}",
                    known.path
                )),
                (true, false) => Err(format!("share {index} of set {set} has two contents")),
                (true, true) => Ok(false),
            };
        }
        let other = |known: &Option<Known>| known.is_some_and(|known| known.path == path);
        if let Some(other) = shares.iter().position(other) {
            return Err(format!(
                "path {path} carries shares {other} and {index} of set {set}"
            ));
        }
        shares[index] = Some(Known {
            path,
            content,
            begins: *begins,
        });
        self.seen.note(Seen::Share);
        self.fresh.insert((ends, set));
        // With all needed, all but one are random, and that one hidden by them. Otherwise what two have
        // between them is random: they are points on a line whose slope is.
        let slope = match (index < 2, shares[0], shares[1]) {
            (true, Some(a), Some(b)) if share.needed < share.shares => {
                Some(std::array::from_fn(|i| a.begins[i] ^ b.begins[i]))
            }
            _ => None,
        };
        let last = (bytes.len() >= 2 * BLOCK).then_some(*ends_in);
        for (block, ends_it) in [(Some(*begins), false), (slope, false), (last, true)] {
            let Some(block) = block else { continue };
            let of = (ends, set);
            // Where a whole ends in zeros, its shares add up to nothing.
            if self
                .blocks
                .insert(block, of)
                .is_some_and(|before| !(ends_it && before == of))
            {
                return Err(format!("random bytes of set {set} were used before"));
            }
        }
        Ok(true)
    }

    /// Pieces of a share take its path; put together they are that share. Whether they are of what is
    /// encrypted whole.
    fn take_piece(
        &mut self,
        ends: Ends,
        path: usize,
        (id, at, total, header): (u32, u32, u32, u16),
        bytes: &[u8],
    ) -> Result<bool, String> {
        if id % 2 == 0 {
            return match bytes.first().filter(|_| at == 0) {
                Some(bump) => {
                    let bump = named(*bump)?;
                    not_split(bump, "a piece of an opaque packet").map(|()| bump == SEAL)
                }
                None => Ok(false),
            };
        }
        let cut = self.cuts.entry((ends, id)).or_default();
        cut.paths.insert(path);
        if at == 0 {
            let block = bytes.get(..usize::from(header));
            let frame = block.and_then(|block| Frames::new(block).next());
            match frame {
                Some(Ok(Frame::Share(share))) => cut.share = Some(share),
                Some(Ok(Frame::Chunk(chunk))) => {
                    let bump = self.flow(ends, chunk.flow, chunk.open.as_ref())?;
                    not_split(bump, "a piece of a chunk")?;
                    let cut = self.cuts.entry((ends, id)).or_default();
                    cut.sealed = bump == SEAL;
                    return Ok(cut.sealed);
                }
                _ => return Err(format!("pieces {id} are of nothing")),
            }
        }
        cut.parts.insert(at, bytes.to_vec());
        let Some(share) = cut.share else {
            return Ok(cut.sealed);
        };
        if cut.paths.len() > 1 {
            return Err(format!(
                "pieces of share {} of set {} took paths {:?}",
                share.index, share.set, cut.paths
            ));
        }
        let whole = cut.parts.values().flatten().copied().collect::<Vec<u8>>();
        if whole.len() < total as usize {
            return Ok(false);
        }
        self.seen.note(Seen::ShareCut);
        self.take_share(ends, path, share, &whole[usize::from(header)..])?;
        Ok(false)
    }
}

/// The bump that a frame names.
fn named(bump: u8) -> Result<BumpId, String> {
    BumpId::new(bump).ok_or_else(|| format!("no bump is {bump}"))
}

fn not_split(bump: BumpId, what: &str) -> Result<(), String> {
    match bump {
        SHARE => Err(format!("{what} of share that was not split")),
        _ => Ok(()),
    }
}
