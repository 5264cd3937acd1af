//! A path to a peer: joining and validation; [`moves`] has what comes of a peer that is seen elsewhere.

mod moves;

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, Frame};

use self::moves::Roaming;
use crate::chunk::Delayed;
use crate::counters::Counter;
use crate::node::notice::Event;
use crate::node::shared::{Journal, Setup, Shared};
use crate::path::{Path, PathConfig, PathState};
use crate::path_index::PathIndex;
use crate::session::{MAX_DATAGRAM, PathId, PeerId, Random};
use crate::time::Time;

/// Wait for the answer to the first join or accept; doubled each time.
const FIRST_RETRY: Duration = Duration::from_millis(200);
const MAX_RETRY: Duration = Duration::from_secs(1);
/// A path that has been asked for in vain for long is asked for less often: after this part of that time, and after so
/// long at most.
const RETRY_SHARE: u32 = 64;
const LONGEST_RETRY: Duration = Duration::from_secs(6);
/// Limit of a first round trip, which is measured with all repetitions of the question.
const LONGEST_TRIP: Duration = Duration::from_secs(1);
/// Time after which nobody is expected to answer soon.
const PATIENCE: Duration = Duration::from_secs(2);
/// Times that an accept is repeated before the peer has to ask again.
const ACCEPTS: u32 = 6;
/// Times that a join is repeated under one path id.
const JOINS: u32 = 16;

/// Among bare datagrams one of so many is authenticated, and shows how far the numbers have come.
pub(in crate::node) const PROOF_SPACING: u64 = 1 << 10;
/// How far the number of a bare datagram may lie ahead of all that were authenticated.
const BARE_AHEAD: u64 = 4 * PROOF_SPACING;

/// To a place that has not proved to be the peer's goes at most so many times what came from there.
const AMPLIFICATION: u64 = 3;
/// Bytes of frames that wait for a datagram of their path, at most.
const MAX_FRAMES: usize = 512;
/// How far a path has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// We asked; the peer has not answered.
    Joining { nonce: [u8; 8], retry: Retry },
    /// The peer asked, and has not answered our challenge.
    Accepting {
        nonce: [u8; 8],
        challenge: [u8; 8],
        retry: Retry,
    },
    /// Both ends have proved themselves.
    Open,
}

/// A repeated question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Retry {
    at: Time,
    tries: u32,
    /// When the question was first asked; an answer may be to any of its repetitions.
    first: Option<Time>,
    /// Since when it, or one like it, has not been answered.
    since: Time,
}

impl Retry {
    fn new(now: Time) -> Self {
        Self {
            at: now,
            tries: 0,
            first: None,
            since: now,
        }
    }

    /// Repeats the same question from now on, as often as a new one.
    fn begin_again(&mut self, now: Time) {
        self.at = now;
        self.tries = 0;
        self.since = now;
    }

    /// True if it is not answered, and will not have been for [`PATIENCE`] when it is repeated.
    fn is_in_vain(&self) -> bool {
        self.at.since(self.since) > PATIENCE
    }

    /// The longest that the answer can have taken. Too short a time would take each of the
    /// datagrams to come for lost; one as long as the peer was away would never miss one.
    fn round_trip(&self, now: Time) -> Duration {
        let longest = self.first.map_or(Duration::ZERO, |first| now.since(first));
        longest.min(LONGEST_TRIP)
    }

    fn next(&mut self, now: Time) {
        let wait = FIRST_RETRY * (1 << self.tries.min(8));
        let asked = now.since(self.since) / RETRY_SHARE;
        self.at = now + wait.min(asked.clamp(MAX_RETRY, LONGEST_RETRY));
        self.tries += 1;
        self.first.get_or_insert(now);
    }
}

/// Outcome of the frames of a datagram.
#[derive(Clone, Copy)]
pub(in crate::node) struct Verdict {
    /// The content was taken, so the datagram may be acknowledged.
    pub(in crate::node) taken: bool,
    /// The peer asks for an acknowledgement.
    pub(in crate::node) eliciting: bool,
    /// Something of a connection's was in it.
    pub(in crate::node) used: bool,
}

/// A path to the peer.
pub(crate) struct Link {
    /// Its number on the wire.
    pub(crate) id: PathId,
    /// The local path.
    pub(crate) local: PathIndex,
    /// The peer's end.
    pub(crate) remote: SocketAddr,
    /// Address of ours by which the peer asked for it.
    called: Option<IpAddr>,
    /// The lower of both ends' labels.
    pub(crate) trusted: bool,
    stage: Stage,
    pub(crate) path: Path,
    /// Bytes received by it.
    pub(crate) bytes_received: u64,
    /// Frames to be sent by it at once, whatever its state.
    pub(crate) frames: Vec<u8>,
    /// A datagram that asks for an acknowledgement is due.
    probe: bool,
    /// Shares that it lost: no other path may carry them.
    pub(crate) shares: VecDeque<Delayed>,
    /// The higher, the later it was chosen for something.
    pub(super) turn: u64,
    /// A scheduler passed it over: it had room, but what waited would be there earlier by others.
    pub(super) passed_over: bool,
    /// Chunks that another path was given and this one carries, too.
    pub(crate) copies: VecDeque<Delayed>,
    roaming: Option<Roaming>,
    /// The peer has another address of ours by this trusted path, which is to be asked for anew.
    moved: bool,
    /// The peer wants nothing of connections by it.
    spent_there: bool,
    /// The highest number of an authentic datagram.
    highest: u64,
    /// Bytes that may be sent before the path is open, if the peer asked for it.
    credit: u64,
    /// The challenge that we answered.
    answered: Option<[u8; 8]>,
    shown: &'static str,
}

/// The longest datagram (UDP payload) to `remote` through an interface that takes packets of `mtu` bytes.
pub(in crate::node) fn longest(mtu: u16, remote: SocketAddr) -> u16 {
    let headers = if remote.is_ipv4() { 28 } else { 48 };
    mtu.saturating_sub(headers).min(MAX_DATAGRAM as u16)
}

impl Link {
    /// A path that we ask the peer to open.
    pub(crate) fn join(
        now: Time,
        shared: &mut Shared,
        id: PathId,
        local: PathIndex,
        remote: SocketAddr,
    ) -> Self {
        let mut nonce = [0; 8];
        shared.dice.rng.fill(&mut nonce);
        Self::new(
            now,
            &shared.setup,
            id,
            local,
            remote,
            Stage::Joining {
                nonce,
                retry: Retry::new(now),
            },
        )
    }

    /// A path that the peer asks to open, by a datagram of `len` bytes.
    #[expect(clippy::too_many_arguments, reason = "all of the question")]
    pub(crate) fn accept(
        now: Time,
        shared: &mut Shared,
        id: PathId,
        local: PathIndex,
        remote: SocketAddr,
        len: u64,
        nonce: [u8; 8],
        trusted: bool,
        called: IpAddr,
    ) -> Self {
        let mut challenge = [0; 8];
        shared.dice.rng.fill(&mut challenge);
        let stage = Stage::Accepting {
            nonce,
            challenge,
            retry: Retry::new(now),
        };
        let mut link = Self::new(now, &shared.setup, id, local, remote, stage);
        link.trusted &= trusted;
        link.called = Some(called);
        link.credit = AMPLIFICATION * len;
        link
    }

    fn new(
        now: Time,
        setup: &Setup,
        id: PathId,
        local: PathIndex,
        remote: SocketAddr,
        stage: Stage,
    ) -> Self {
        let longest = longest(setup.local[local].mtu, remote);
        let mut path = Path::new(now, PathConfig { longest });
        path.set_rate_limit(setup.local[local].usage.rate);
        path.set_probes(setup.probes_of(local));
        Self {
            id,
            local,
            remote,
            called: None,
            trusted: setup.local[local].trusted,
            stage,
            path,
            bytes_received: 0,
            frames: Vec::new(),
            probe: false,
            shares: VecDeque::new(),
            turn: 0,
            passed_over: false,
            copies: VecDeque::new(),
            roaming: None,
            moved: false,
            spent_there: false,
            highest: 0,
            credit: 0,
            answered: None,
            shown: "",
        }
    }

    /// True if the peer asked for it by this address of ours.
    pub(super) fn is_called(&self, addr: IpAddr) -> bool {
        self.called == Some(addr)
    }

    /// True if it may carry what the peers exchange.
    pub(crate) fn is_open(&self) -> bool {
        self.stage == Stage::Open
    }

    /// Lets its datagrams be numbered from `seq` on.
    pub(crate) fn starting_at(self, seq: u64) -> Self {
        Self {
            path: self.path.starting_at(seq),
            ..self
        }
    }

    /// The same, of a path that is asked for in the place of `other`, which nobody answered.
    pub(super) fn instead_of(mut self, other: &Self) -> Self {
        if let (Stage::Joining { retry, .. }, Stage::Joining { retry: before, .. }) =
            (&mut self.stage, other.stage)
        {
            retry.since = before.since;
            self.shown = other.shown;
        }
        self
    }

    /// True if the peer asked for it and has not proved itself.
    pub(crate) const fn is_accepting(&self) -> bool {
        matches!(self.stage, Stage::Accepting { .. })
    }

    /// True if we asked for it and were not answered.
    pub(crate) const fn is_joining(&self) -> bool {
        matches!(self.stage, Stage::Joining { .. })
    }

    /// True if we asked for it for long and were not answered.
    pub(super) fn is_silent(&self) -> bool {
        matches!(self.stage, Stage::Joining { retry, .. } if retry.is_in_vain())
    }

    /// True if we asked for it so many times and were not answered.
    pub(crate) fn has_asked(&self, times: u32) -> bool {
        matches!(self.stage, Stage::Joining { retry, .. } if retry.tries >= times)
    }

    /// True if another path over the same interface is worth asking for: the peer has stopped asking for this one, or
    /// does not answer by it, perhaps for it knows nothing of it, or knows another by its id.
    pub(crate) fn is_lost(&self) -> bool {
        match self.stage {
            Stage::Joining { retry, .. } => retry.tries >= JOINS,
            Stage::Accepting { retry, .. } => retry.tries >= ACCEPTS,
            Stage::Open => self.is_down() || self.moved,
        }
    }

    /// True if the path joins these places, or its peer was seen there since.
    pub(super) fn is_of(&self, local: PathIndex, remote: SocketAddr) -> bool {
        let seen_there = self.roaming.is_some_and(|roaming| roaming.to == remote);
        self.local == local && (self.remote == remote || seen_there)
    }

    /// Another path is asked for in its place; if it is not answered, that is not done again before the peer says so.
    pub(super) fn on_asked_anew(&mut self) {
        self.moved = false;
    }

    /// True if it was open, and the peer has been silent on it for seconds.
    pub(crate) fn is_down(&self) -> bool {
        self.is_open() && self.path.state() == PathState::Down
    }

    /// True if the peer answers by this path.
    pub(crate) fn is_alive(&self, setup: &Setup) -> bool {
        self.is_open()
            && setup.local[self.local].is_usable()
            && self.path.state() == PathState::Active
    }

    /// True if the peer answers by this path, or did within seconds.
    pub(crate) fn is_answering(&self, setup: &Setup) -> bool {
        let seen = matches!(self.path.state(), PathState::Active | PathState::Suspect);
        self.is_open() && setup.local[self.local].is_usable() && seen
    }

    /// True if new data may go by it.
    pub(crate) fn is_active(&self, setup: &Setup) -> bool {
        self.is_alive(setup) && !setup.local[self.local].usage.spent && !self.spent_there
    }

    /// True if the peer wants nothing of connections by this path.
    pub(super) const fn is_spent_there(&self) -> bool {
        self.spent_there
    }

    /// The type of the frame that asks by it for an acknowledgement.
    pub(in crate::node) fn ping(&self, setup: &Setup) -> u8 {
        match setup.local[self.local].usage.spent {
            true => frame::PING_SPENT,
            false => frame::PING,
        }
    }

    /// The peer asks for an acknowledgement, and says whether its volume is used up there.
    pub(super) fn on_ping(&mut self, spent_there: bool) {
        self.spent_there = spent_there;
    }

    /// Name of its state, as the user is shown it.
    pub(crate) fn state_name(&self, setup: &Setup) -> &'static str {
        if !self.is_open() && !self.is_silent() {
            return "joining";
        }
        let local = &setup.local[self.local];
        if !local.is_usable() || local.usage.spent {
            return "down";
        }
        match self.path.state() {
            PathState::Active => "active",
            PathState::Suspect => "suspect",
            PathState::Down | PathState::Unvalidated => "down",
        }
    }

    /// Tells the owner if the state is not what it was told last.
    pub(crate) fn note_state(&mut self, shared: &mut Shared, peer: PeerId) {
        let state = self.state_name(&shared.setup);
        if state != self.shown {
            self.shown = state;
            shared.journal.events.push(Event::Path {
                peer: peer.index(),
                path: self.local.get(),
                state,
            });
        }
    }

    /// Takes so many bytes of what may be sent by it now: without limit but for a place that is not
    /// proved. False if that is not enough.
    pub(crate) fn spend(&mut self, len: usize) -> bool {
        if !self.is_accepting() {
            return true;
        }
        let left = self.credit.checked_sub(len as u64);
        self.credit = left.unwrap_or(self.credit);
        left.is_some()
    }

    /// The interface is back: asks at once whatever is to be asked.
    pub(crate) fn on_up(&mut self, now: Time) {
        self.probe = true;
        match &mut self.stage {
            Stage::Joining { retry, .. } | Stage::Accepting { retry, .. } => {
                retry.at = retry.at.min(now);
                retry.since = now;
            }
            Stage::Open => {}
        }
    }

    /// The session is new: asks by it at once, if there is anything to be asked.
    pub(crate) fn ask_again(&mut self, now: Time) {
        if let Stage::Joining { retry, .. } = &mut self.stage {
            retry.begin_again(now);
        }
    }

    /// The peer is to acknowledge something by it.
    pub(in crate::node) fn elicit_ack(&mut self) {
        self.probe = true;
    }

    /// True if a datagram that asks for an acknowledgement is due; it goes now.
    pub(crate) fn take_probe(&mut self) -> bool {
        self.is_open() && std::mem::take(&mut self.probe)
    }

    /// True if anything is due by it beside an acknowledgement.
    pub(crate) fn has_frames(&self) -> bool {
        !self.frames.is_empty() || (self.is_open() && self.probe)
    }

    /// Queues a frame that goes by this path.
    pub(crate) fn push_frame(&mut self, journal: &mut Journal, frame: &Frame<'_>) {
        let mut bytes = [0; 64];
        let mut w = Writer::new(&mut bytes);
        frame::encode(frame, &mut w);
        let len = w.len();
        // What a peer can make us answer is bounded.
        if self.frames.len() + len > MAX_FRAMES {
            return journal.count(Counter::PathFrameDropped);
        }
        self.frames.extend_from_slice(&bytes[..len]);
    }

    /// When [`on_timer`](Self::on_timer) is due.
    pub(crate) fn timer(&self) -> Option<Time> {
        let stage = match self.stage {
            Stage::Joining { retry, .. } => Some(retry.at),
            Stage::Accepting { retry, .. } if retry.tries < ACCEPTS => Some(retry.at),
            Stage::Accepting { .. } | Stage::Open => None,
        };
        let roaming = self.roaming.as_ref().map(|r| r.retry.at);
        [stage, roaming].into_iter().flatten().min()
    }

    /// Repeats what has not been answered.
    pub(crate) fn on_timer(&mut self, now: Time, shared: &mut Shared) {
        let label = shared.setup.local[self.local].trusted;
        match &mut self.stage {
            Stage::Joining { nonce, retry } if retry.at <= now => {
                retry.next(now);
                let frame = Frame::PathJoin {
                    nonce: *nonce,
                    trusted: label,
                    to: self.remote.ip(),
                };
                self.push_frame(&mut shared.journal, &frame);
            }
            Stage::Accepting {
                nonce,
                challenge,
                retry,
            } if retry.at <= now && retry.tries < ACCEPTS => {
                retry.next(now);
                let frame = Frame::PathAccept {
                    nonce: *nonce,
                    challenge: *challenge,
                    trusted: label,
                };
                // What could not be sent for want of credit is of no use any more.
                self.frames.clear();
                self.push_frame(&mut shared.journal, &frame);
            }
            _ => {}
        }
        // At most three challenges go to a place that is not proved; `poll_challenge` sends them.
        if self
            .roaming
            .as_ref()
            .is_some_and(|r| r.retry.at <= now && r.retry.tries >= 3)
        {
            self.roaming = None;
        }
    }

    /// The peer asks (again) to open this path.
    pub(crate) fn on_join(
        &mut self,
        now: Time,
        shared: &mut Shared,
        nonce: [u8; 8],
        trusted: bool,
    ) {
        match &mut self.stage {
            Stage::Accepting {
                nonce: known,
                retry,
                ..
            } => {
                *known = nonce;
                retry.begin_again(now);
                self.trusted = shared.setup.local[self.local].trusted && trusted;
            }
            // The peer missed our confirmation of its own challenge, or the other way round: it
            // proved itself before; the label can only fall.
            Stage::Open => {
                self.trusted &= trusted;
                let label = shared.setup.local[self.local].trusted;
                self.push_frame(
                    &mut shared.journal,
                    &Frame::PathAccept {
                        nonce,
                        challenge: [0; 8],
                        trusted: label,
                    },
                );
            }
            Stage::Joining { .. } => {}
        }
    }

    /// A datagram of it was taken, which a router may have marked for congestion.
    pub(crate) fn on_taken(
        &mut self,
        now: Time,
        setup: &Setup,
        seq: u64,
        verdict: Verdict,
        marked: bool,
    ) {
        self.path.on_received(now, seq, verdict.eliciting);
        if verdict.used {
            self.path.on_used(now);
            // The peer does not know that it is not to.
            self.probe |= setup.local[self.local].usage.spent;
        }
        if marked {
            self.path.on_marked();
        }
        // It is there again: an answer to a question of ours makes it ours to use.
        self.probe |= verdict.eliciting && self.path.state() != PathState::Active;
    }

    /// Data came although the peer has not answered our challenge: it did, and the answer was lost.
    pub(crate) fn on_early_data(&mut self) {
        if let Stage::Accepting { retry, .. } = &mut self.stage {
            retry.tries = retry.tries.min(ACCEPTS - 1);
        }
    }

    /// The peer accepts; false if that answers nothing of ours.
    pub(crate) fn on_accept(
        &mut self,
        now: Time,
        shared: &mut Shared,
        nonce: [u8; 8],
        challenge: [u8; 8],
        trusted: bool,
    ) -> bool {
        match self.stage {
            Stage::Joining { nonce: ours, retry } if ours == nonce => {
                self.trusted &= trusted;
                self.stage = Stage::Open;
                self.path.on_validated(now, retry.round_trip(now));
                self.answered = Some(challenge);
                self.push_frame(&mut shared.journal, &Frame::PathConfirm { challenge });
                true
            }
            // Our confirmation was lost; or somebody had our question answered at another
            // interface, and brought us that answer.
            Stage::Open => {
                if self.answered == Some(challenge) {
                    self.push_frame(&mut shared.journal, &Frame::PathConfirm { challenge });
                }
                true
            }
            _ => false,
        }
    }

    /// The peer answers our challenge; false if it does not, or one that was not sent to where it is
    /// now.
    pub(crate) fn on_confirm(&mut self, now: Time, challenge: [u8; 8]) -> bool {
        match self.stage {
            Stage::Accepting {
                challenge: ours,
                retry,
                ..
            } if ours == challenge => {
                self.stage = Stage::Open;
                self.path.on_validated(now, retry.round_trip(now));
                true
            }
            Stage::Open => true,
            _ => false,
        }
    }

    /// True if a bare datagram may be one of the peer's: it comes from where the peer is, and its number is one that
    /// may have been sent. A forged one must not acknowledge a far future.
    pub(crate) fn expects_bare(&self, seq: u64, from: SocketAddr) -> bool {
        from == self.remote && seq <= self.highest.saturating_add(BARE_AHEAD)
    }
}
