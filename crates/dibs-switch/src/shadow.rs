//! Shadow of a connection in plain while it is on a bump, so that routers on the way do not lose track of it.
//!
//! A router that translates addresses follows TCP's numbers, and takes for invalid what is further than a window from what it has
//! seen. So each end shows now and then, in plain, where its kernel stands: one byte that the other kernel has acknowledged already, and so
//! never takes for data. A router lets only pass what fits what it saw of the other end (Linux, `tcp_in_window` in
//! net/netfilter/nf_conntrack_proto_tcp.c). So an end says no more than fits what it has heard of the other one, and the two go on
//! in steps of a window until both have said all.
//!
//! A connection that both ends call alike is shown only once a [knock](crate::knock) for it is not heard, from where it left plain on, or
//! once much went by the bump since the knock, from there on: a firewall on the way may have lost track of it.

use std::time::Duration;

use dibs_core::Time;
use dibs_wire::SeqNumber;
use dibs_wire::packet::{self, FlowKey, Packet, flags};

use crate::knock;
use crate::matching::Stand;

/// Window that a shadow shows, which the connection shifts by its scale.
const WINDOW: u16 = u16::MAX;
/// Time after which it is shown again although nothing moved: some routers forget a connection that is idle for 30 seconds.
const AT_LEAST_EACH: Duration = Duration::from_secs(25);
/// Time in which a connection takes its bump, once it is known where it stands in plain.
const FRESH_FOR: Duration = Duration::from_secs(30);
/// Bytes by which the first shadow acknowledges less than the kernel has. Linux's conntrack takes what is up to 66,000 bytes behind
/// what it has seen (MAXACKWINDOW).
const BEHIND: u32 = 64_000;
/// Bytes that a firewall takes by which an end has gone further since it was seen: about the largest window without a scale, as
/// kernels begin with.
const TAKEN: u32 = 64_000;
/// Bytes by which the other end may be ahead of what the kernel here was told, as plain is quicker than the bump.
const AHEAD: u32 = 64 << 20;
/// Bytes by which a late packet may be behind what was heard.
const BEFORE: u32 = 1 << 20;
/// Time before the same is shown again to an end that is not heard.
const REPEAT_AFTER: Duration = Duration::from_millis(300);
/// The same while routers are to know all of it.
const ASKED_AGAIN: Duration = Duration::from_millis(100);
/// Repetitions of that, or for an end that repeats itself.
const REPETITIONS: u32 = 4;
/// Time after which an end that was not heard is taken for lost: it shows itself twice in it.
const SILENT_AFTER: Duration = Duration::from_secs(60);
/// Time for the routers to hear of all of it.
const ASKED_FOR: Duration = Duration::from_secs(4);
/// Time between two shadows meanwhile, except for whole windows: an answer to each would be one each round trip.
const ASKED_EACH: Duration = Duration::from_millis(20);
/// Time for which nothing is shown of a connection that a rule of the other host requires on its bump, from its last word on.
pub const HIDDEN_FOR: Duration = Duration::from_secs(60);
/// Time for which an end that knocks may have the other one show itself, and repeats its knock while the two get on.
pub const CATCH_UP_WITHIN: Duration = Duration::from_secs(16);

/// Numbers of one end: what the other kernel has acknowledged of its bytes, and what its kernel has acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    /// Number behind the bytes of this end that the other kernel has acknowledged.
    pub given: SeqNumber,
    /// Number behind the bytes of the other end that the kernel here has acknowledged.
    pub acked: SeqNumber,
}

impl From<Stand> for Numbers {
    /// The numbers of a connection in plain, as its kernel says them.
    fn from(stand: Stand) -> Self {
        Self {
            given: SeqNumber::new(stand.seq),
            acked: SeqNumber::new(stand.ack),
        }
    }
}

impl From<knock::Numbers> for Numbers {
    /// The numbers of an end that knocked, as a router saw them.
    fn from(knocked: knock::Numbers) -> Self {
        let (given, acked) = knocked.seen();
        Self { given, acked }
    }
}

impl Numbers {
    /// The same numbers as the other end has them.
    const fn reversed(self) -> Self {
        Self {
            given: self.acked,
            acked: self.given,
        }
    }

    /// True if an end that has sent up to `sent_end` may stand so. No more than a window of the other end is under way, which that
    /// shifts by `scale` (RFC 7323). Otherwise something in plain changes numbers, and what the far kernel acknowledges is none of them.
    pub fn may_be_of(self, sent_end: SeqNumber, scale: u8) -> bool {
        sent_end.raw().wrapping_sub(self.given.raw()) <= window(scale)
    }

    /// These numbers, or what an end had `before` where that is later: routers know the latest.
    fn or_later(self, before: Option<Self>) -> Self {
        let Some(before) = before else {
            return self;
        };
        let later =
            |one: SeqNumber, other: SeqNumber| if other.is_after(one) { other } else { one };
        Self {
            given: later(self.given, before.given),
            acked: later(self.acked, before.acked),
        }
    }

    /// Bytes of that end that went further from these numbers to `later`.
    fn bytes_to(self, later: Self) -> u32 {
        let bytes = |to: SeqNumber, from| to.distance_from(from).unsigned_abs();
        bytes(later.given, self.given).max(bytes(later.acked, self.acked))
    }

    /// The shadow as a packet of the connection.
    ///
    /// Its acknowledgement is one byte less, so a reset by a stranger, such as a router that has forgotten the
    /// connection, has a number outside the window of the kernel here, and ends nothing (RFC 5961, 3.2).
    pub fn packet(self, pair: &FlowKey) -> Vec<u8> {
        knock::shown(pair, self.shown(), WINDOW)
    }

    /// The same without its byte, which could be new to the other kernel. Nobody reads it as a shadow, but routers see it.
    pub fn bare_packet(self, pair: &FlowKey) -> Vec<u8> {
        knock::acknowledgement(pair, self.shown(), None)
    }

    /// Number of the byte that is shown, and the acknowledgement with it.
    const fn shown(self) -> (SeqNumber, SeqNumber) {
        let before = u32::MAX;
        (self.given.add(before), self.acked.add(before))
    }

    /// Connection, as the host sends that hears it, and the numbers of the end that showed it, as a router saw them.
    pub fn read(bytes: &[u8]) -> Option<(FlowKey, Self)> {
        let Ok(Packet::Tcp(segment)) = packet::parse(bytes) else {
            return None;
        };
        let numbers = Self {
            given: segment.seq.add(1),
            acked: segment.ack,
        };
        let is_shadow = segment.flags == flags::ACK && segment.payload.len() == 1;
        is_shadow.then_some((segment.tuple.reversed(), numbers))
    }
}

/// One end's part.
#[derive(Clone, Debug)]
pub struct Shadow {
    since: Time,
    /// Time at which the other end was last heard, or the connection left plain.
    heard_at: Time,
    /// Numbers of this end when it left plain.
    left: Option<Numbers>,
    shown: Option<(Numbers, Time)>,
    repeated: u32,
    /// Repetitions for an end that repeated itself.
    answered: u32,
    /// Numbers of the other end that the routers know.
    heard: Option<Numbers>,
    /// Numbers that were heard before the first look at where this end stands.
    unchecked: Option<Numbers>,
    /// True if the other end was heard since the connection left plain.
    is_heard: bool,
    /// Something came that is not answered yet.
    is_answer_due: bool,
    /// Time at which the routers were to know all of it.
    asked: Option<Time>,
    /// Time from which on shadows of the other end are answered.
    knocked: Option<Time>,
    /// Time at which the other host said that a rule of it requires the bump.
    hidden: Option<Time>,
    /// Bytes between what is shown and where this end stands.
    behind: u32,
    /// Numbers of this end at the last look.
    stands: Option<Numbers>,
    /// Numbers of this end at the first look.
    first: Option<Numbers>,
    /// True if an end that was never heard is shown what routers know that follow shadows, which are of large windows.
    is_far_back: bool,
}

impl Shadow {
    /// Shadow of a connection. `plain`: where this end stood in plain, if that is known.
    pub fn new(plain: Option<Numbers>, now: Time) -> Self {
        Self {
            since: now,
            heard_at: now,
            left: None,
            shown: None,
            repeated: 0,
            answered: 0,
            heard: plain.map(Numbers::reversed),
            unchecked: None,
            is_heard: false,
            is_answer_due: false,
            asked: None,
            knocked: None,
            hidden: None,
            behind: 0,
            stands: None,
            first: None,
            is_far_back: false,
        }
    }

    /// The connection left plain when this end stood so. What is known from before says less, unless something was shown since, or
    /// both ends knocked.
    pub fn handle_left(&mut self, plain: Numbers) {
        let before = self.left.replace(plain);
        let is_shown = self.shown.is_some() || self.is_heard;
        if before.is_none() && !is_shown && self.is_news(plain.reversed())
            || before.is_some_and(|before| before != plain)
        {
            (self.shown, self.is_heard) = (None, false);
            self.heard = Some(plain.reversed());
        }
    }

    /// The other end was heard in plain. Numbers that it cannot have are somebody else's: each answer would be as wrong, and be answered.
    pub fn handle_heard(&mut self, numbers: Numbers, now: Time) {
        let (latest, heard) = match self.stands {
            Some(stands) if !is_possible(numbers, self.heard, stands) => return,
            // A copy that comes late takes nothing back: this end would say all again from there, and the other one would answer all.
            Some(_) if self.is_heard => (numbers.or_later(self.heard), &mut self.heard),
            // Until now this end took routers to know all that its kernel has, and some of that came by the bump.
            Some(_) => (numbers, &mut self.heard),
            None => (numbers, &mut self.unchecked),
        };
        self.heard_at = now;
        // An end that repeats itself, or has begun anew, does not get on.
        self.is_answer_due |= !self.is_heard || *heard == Some(latest);
        *heard = Some(latest);
        self.is_heard = true;
        self.repeated = 0;
    }

    /// Both ends knocked, and this one heard the other: routers know these numbers of it.
    pub fn handle_knocked(&mut self, theirs: Numbers) {
        if self.is_news(theirs) {
            self.heard = Some(theirs);
        }
    }

    /// True if these numbers of the other end are later than those that routers are known to have.
    fn is_news(&self, theirs: Numbers) -> bool {
        self.heard.is_none_or(|heard| {
            theirs.given.is_after(heard.given) || theirs.acked.is_after(heard.acked)
        })
    }

    /// True if so much went by the bump since routers were seen to know both ends that they may take no word of an end any more that has
    /// sent up to `sent_end`, and acknowledged up to `acked`.
    pub fn is_outrun(&self, (sent_end, acked): (SeqNumber, SeqNumber)) -> bool {
        let is_far = |number: SeqNumber, seen: SeqNumber| {
            let bytes = number.raw().wrapping_sub(seen.raw());
            bytes > TAKEN && bytes < BEFORE.wrapping_neg()
        };
        self.heard
            .is_some_and(|heard| is_far(sent_end, heard.acked) || is_far(acked, heard.given))
    }

    /// Number behind the bytes of the other end that routers have seen.
    pub fn seen(&self) -> Option<SeqNumber> {
        self.heard.map(|heard| heard.given)
    }

    /// The connection is about to go to plain: the routers are to know all of it.
    pub fn ask(&mut self, now: Time) {
        self.asked = Some(now);
        self.repeated = 0;
    }

    /// The connection may be about to go to plain: shadows of the other end are answered from now on.
    pub fn listen(&mut self, now: Time) {
        self.knocked = Some(now);
    }

    /// The other end knocks: no rule there requires the bump any more.
    pub fn handle_knock(&mut self, now: Time) {
        self.hidden = None;
        self.listen(now);
    }

    /// A rule of the other host requires the bump: nothing of the connection is shown for [`HIDDEN_FOR`].
    pub fn hide(&mut self, now: Time) {
        self.hidden = Some(now);
    }

    /// True if the routers are to know all of it now.
    pub fn is_asked(&self, now: Time) -> bool {
        is_within(self.asked, ASKED_FOR, now)
            || is_within(self.knocked, CATCH_UP_WITHIN, now)
                && is_within(self.is_heard.then_some(self.heard_at), ASKED_FOR, now)
    }

    /// True if it is shown, or will be if the other end is heard. Otherwise plain is not `kept` open for it, and nothing asks for it now, or
    /// a rule of the other host wants nothing of it to be seen.
    pub fn is_due(&self, kept: bool, now: Time) -> bool {
        let is_on_demand =
            is_within(self.asked, ASKED_FOR, now) || is_within(self.knocked, CATCH_UP_WITHIN, now);
        (kept || is_on_demand) && !self.is_hidden(now)
    }

    fn is_hidden(&self, now: Time) -> bool {
        is_within(self.hidden, HIDDEN_FOR, now)
    }

    /// True if the other end was heard since the connection left plain.
    pub const fn is_heard(&self) -> bool {
        self.is_heard
    }

    /// True if the other end was heard since then, and since the connection left plain.
    pub fn is_heard_since(&self, from: Time) -> bool {
        self.is_heard && self.heard_at >= from
    }

    /// Bytes that routers have not been shown, if the other end was heard since `from`.
    pub fn behind(&self, from: Time) -> Option<u32> {
        self.is_heard_since(from).then_some(self.behind)
    }

    /// State of plain: true if it carries the connection as far as that shows, and the time at which the other end was last heard.
    pub fn plain(&self, now: Time) -> (bool, Time) {
        let is_heard = now.since(self.heard_at) < SILENT_AFTER && self.repeated < REPETITIONS;
        (is_heard && !self.is_hidden(now), self.heard_at)
    }

    /// True if the other end has shown that it has all up to `sent`, so routers on the way have seen that.
    pub fn is_level(&self, sent: SeqNumber) -> bool {
        let acked = self.heard.map(|heard| heard.acked.add(1));
        acked.is_some_and(|acked| !sent.is_after(acked))
    }

    /// True if the other end has shown all that the kernel here has acknowledged up to `acked`, so routers on the way let that pass.
    pub fn has_shown(&self, acked: SeqNumber) -> bool {
        let given = self.heard.map(|heard| heard.given);
        given.is_some_and(|given| !acked.is_after(given))
    }

    /// True if it still says where the connection leaves plain, although that is not on a bump yet.
    pub fn is_fresh(&self, now: Time) -> bool {
        now.since(self.since) < FRESH_FOR && self.shown.is_none()
    }

    /// Numbers that are to be shown now, of an end that stands so. The other end shifts its windows by `scale` (RFC 7323).
    pub fn poll(&mut self, stands: Numbers, scale: u8, now: Time) -> Option<Numbers> {
        let first = *self.first.get_or_insert(stands);
        if self.stands.replace(stands).is_none()
            && let Some(numbers) = self.unchecked.take()
        {
            match is_possible(numbers, self.heard, stands) {
                true => self.heard = Some(numbers),
                false => self.is_heard = false,
            }
        }
        let window = window(scale);
        let mut next = self.within_window(stands, first, window);
        self.behind = next.bytes_to(stands);
        let is_asked = self.is_asked(now);
        let answers = std::mem::take(&mut self.is_answer_due);
        if let Some((shown, at)) = self.shown {
            let far = |end: Numbers| shown.bytes_to(end) >= window / 2;
            let since = now.since(at);
            let goes_on =
                next != shown && (far(next) || answers || is_asked && since >= ASKED_EACH);
            // The last one was lost, or the other end's.
            let is_level = stands == shown && self.is_level(stands.given);
            // The first one of either end may come before the other listens.
            let is_stuck = far(stands) || is_asked && !is_level || !self.is_heard;
            let patience = if is_asked { ASKED_AGAIN } else { REPEAT_AFTER };
            let again = is_stuck && since >= patience && self.repeated < REPETITIONS;
            // What this end said last was lost. It does not answer what answers that itself, or a few times on a long way.
            if since >= ASKED_FOR {
                self.answered = 0;
            }
            let answers = answers && since >= ASKED_AGAIN && self.answered < REPETITIONS;
            if !goes_on && !again && !answers && since < AT_LEAST_EACH {
                return None;
            }
            (self.repeated, self.answered) = match (goes_on, again || !answers) {
                (true, _) => (0, 0),
                (false, true) => (self.repeated + 1, self.answered),
                (false, false) => (self.repeated, self.answered + 1),
            };
            if !goes_on && again && self.heard.is_none() {
                self.is_far_back = !self.is_far_back;
                next = self.within_window(stands, first, window);
            }
        }
        self.shown = Some((next, now));
        Some(next)
    }

    /// Part of these numbers that fits what was heard, or else of those at the `first` look.
    fn within_window(&self, stands: Numbers, first: Numbers, window: u32) -> Numbers {
        let Some(heard) = self.heard else {
            // Something may have gone by the bump already. Both ends may have begun anew, and what the other one showed last may be
            // half a window behind; routers that saw shadows take what is a window behind.
            let far_back = BEHIND.max(window / 4 * 3);
            let behind = if self.is_far_back { far_back } else { BEHIND };
            let acked = first.acked.add(behind.wrapping_neg());
            return Numbers { acked, ..first };
        };
        // No further than `step` from what was heard. A kernel is no more than a window behind that, and may be far ahead, as
        // gigabytes go by a bump.
        let least = |stands: SeqNumber, heard: SeqNumber, step: u32| {
            let ahead = stands.raw().wrapping_sub(heard.raw());
            match ahead > step && ahead < window.wrapping_neg() {
                true => heard.add(step),
                false => stands,
            }
        };
        // The windows that were seen in plain may be small.
        let step = if self.is_heard { window } else { 0 };
        Numbers {
            given: least(stands.given, heard.acked, step),
            acked: least(stands.acked, heard.given, 0),
        }
    }
}

/// Largest window of an end that shifts it by `scale`.
fn window(scale: u8) -> u32 {
    u32::from(WINDOW) << scale.min(14)
}

/// True if the other end may stand so: not before what was heard of it, and not further than both kernels are.
fn is_possible(numbers: Numbers, before: Option<Numbers>, stands: Numbers) -> bool {
    // What was heard last may be ahead of what the kernel was told since.
    let most = |stands: SeqNumber| stands.add(AHEAD);
    let Some(before) = before else {
        return !numbers.acked.is_after(most(stands.given))
            && !numbers.given.is_after(most(stands.acked));
    };
    let up_to = |from: SeqNumber, to: SeqNumber| to.raw().wrapping_sub(from.raw());
    let lies = |number, before: SeqNumber, stands: SeqNumber| {
        let most = up_to(before, most(stands));
        up_to(before.add(BEFORE.wrapping_neg()), number) <= most.saturating_add(BEFORE)
    };
    lies(numbers.acked, before.acked, stands.given)
        && lies(numbers.given, before.given, stands.acked)
}

/// True if something was so short a time ago.
fn is_within(at: Option<Time>, time: Duration, now: Time) -> bool {
    at.is_some_and(|at| now.since(at) < time)
}

#[cfg(test)]
mod tests;
