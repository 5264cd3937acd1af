//! Path MTU discovery by probing: DPLPMTUD, RFC 8899. Sizes are UDP payloads.

use crate::time::Time;
use core::time::Duration;

/// Bytes that every path is taken to carry (RFC 8899, 5.1.2; RFC 9000, 14).
pub const BASE: u16 = 1200;

/// Losses of one probe size after which it is taken not to pass (RFC 8899, 5.1.2).
const MAX_PROBES: u8 = 3;

/// Gain below which the search is not worth going on.
const CLOSE_ENOUGH: u16 = 16;

/// When larger sizes are searched again (RFC 8899, 5.1.1).
const RAISE_AFTER: Duration = Duration::from_secs(600);

/// When one probe of the largest size goes first, and then after twice as long each time until
/// [`RAISE_AFTER`]: the probes of a search follow each other within a few round trips, so what disturbs
/// the path for a moment takes them all.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// Reports of loss in a row that concern only large datagrams, after which large ones are taken not
/// to pass any more (RFC 8899, 4.3).
const BLACK_HOLE_LOSSES: u8 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Search {
    /// To send a probe of this size; `losses` of this size were lost.
    Wanted { size: u16, losses: u8 },
    /// A probe is in flight.
    Probing { size: u16, losses: u8 },
    /// Nothing to do until this time.
    Complete { again: Time },
}

/// The search for the largest datagram that passes.
#[derive(Debug)]
pub(super) struct Mtud {
    current: u16,
    /// What the interface takes.
    max: u16,
    /// The least size that is known not to pass, or `max + 1`.
    fails: u16,
    search: Search,
    /// How long what has been found is taken to hold.
    raise_after: Duration,
    /// While a single probe is out: what `fails` becomes if it is lost.
    known: Option<u16>,
    /// A datagram that needs more than half of what passes has arrived since the last search.
    in_use: bool,
    /// Reports of loss of large datagrams in a row, and the least size that they concern.
    suspicious: u8,
    suspicious_size: u16,
}

impl Mtud {
    /// A search from [`BASE`] to `max`. An interface that takes not even that does not count: nothing
    /// smaller is ever made, so nothing passes there.
    pub(super) fn new(max: u16) -> Self {
        let max = max.max(BASE);
        let mut mtud = Self {
            current: BASE,
            max,
            fails: max.saturating_add(1),
            search: Search::Complete { again: Time::ZERO },
            raise_after: RETRY_AFTER,
            known: None,
            in_use: false,
            suspicious: 0,
            suspicious_size: u16::MAX,
        };
        mtud.restart();
        mtud
    }

    /// The interface takes other sizes from now on: what was found out is void.
    pub(super) fn set_max(&mut self, max: u16) {
        self.max = max.max(BASE);
        self.current = self.current.min(self.max);
        self.raise_after = RETRY_AFTER;
        self.trust();
        self.restart();
    }

    /// The largest datagram that passes, as far as is known.
    pub(super) const fn current(&self) -> u16 {
        self.current
    }

    /// Size of the probe to send now.
    pub(super) fn poll(&mut self, now: Time) -> Option<u16> {
        if self.due_at().is_some_and(|again| now >= again) {
            let known = self.fails;
            self.restart();
            if self.raise_after < RAISE_AFTER {
                self.raise_after = (self.raise_after * 2).min(RAISE_AFTER);
                self.known = Some(known);
            }
        }
        match self.search {
            Search::Wanted { size, .. } => Some(size),
            _ => None,
        }
    }

    /// When [`Self::poll`] has something again. A path that carries nothing is searched no more once the single probes
    /// are through: a search is of some kilobytes, and would be most of what such a path costs.
    pub(super) fn due_at(&self) -> Option<Time> {
        let wanted = self.in_use || self.raise_after < RAISE_AFTER;
        match self.search {
            Search::Complete { again } if self.current < self.max && wanted => Some(again),
            _ => None,
        }
    }

    pub(super) fn on_probe_sent(&mut self) {
        if let Search::Wanted { size, losses } = self.search {
            self.search = Search::Probing { size, losses };
        }
    }

    pub(super) fn on_probe_acked(&mut self, now: Time, size: u16) {
        // A probe of an earlier search counts as well, unless the system has refused its size since.
        if size > self.current && size < self.fails {
            self.current = size;
            self.trust();
            self.advance(now);
        }
    }

    pub(super) fn on_probe_lost(&mut self, now: Time, size: u16) {
        let Search::Probing {
            size: probed,
            losses,
        } = self.search
        else {
            return;
        };
        if size != probed {
            return;
        }
        if losses + 1 < MAX_PROBES && self.known.is_none() {
            self.search = Search::Wanted {
                size,
                losses: losses + 1,
            };
        } else {
            self.fails = self.known.unwrap_or(size);
            self.advance(now);
        }
    }

    /// The system refused a datagram of `size` (EMSGSIZE).
    pub(super) fn on_too_big(&mut self, now: Time, size: u16) {
        if size <= BASE {
            // Nothing smaller is ever sent: the system's answer changes nothing.
            return;
        }
        self.fails = self.fails.min(size).min(self.known.unwrap_or(size));
        if self.current >= size {
            self.current = BASE;
        }
        self.advance(now);
    }

    /// A datagram of `size` that was no probe was acknowledged.
    pub(super) fn on_acked(&mut self, size: u16) {
        self.in_use |= size > self.current / 2;
        if size >= self.suspicious_size {
            self.trust();
        }
    }

    /// A report declared datagrams lost that were no probes, the smallest of `smallest` bytes.
    pub(super) fn on_lost(&mut self, now: Time, smallest: u16) {
        if smallest <= BASE {
            return;
        }
        self.suspicious += 1;
        self.suspicious_size = self.suspicious_size.min(smallest);
        if self.suspicious >= BLACK_HOLE_LOSSES {
            self.fails = self.suspicious_size;
            self.trust();
            self.current = BASE;
            self.advance(now);
        }
    }

    /// Nothing has passed for a while: what was lost says nothing about its size.
    pub(super) fn on_outage(&mut self) {
        self.trust();
        self.on_given_up();
    }

    /// What is under way is given up: if a probe is, it says nothing about its size.
    pub(super) fn on_given_up(&mut self) {
        if let Search::Probing { size, losses } = self.search {
            self.search = Search::Wanted { size, losses };
        }
    }

    fn trust(&mut self) {
        self.suspicious = 0;
        self.suspicious_size = u16::MAX;
    }

    /// Forgets what failed and tries the largest size first: most often it passes.
    fn restart(&mut self) {
        self.fails = self.max.saturating_add(1);
        self.known = None;
        self.in_use = false;
        self.search = if self.current < self.max {
            Search::Wanted {
                size: self.max,
                losses: 0,
            }
        } else {
            Search::Complete { again: Time::ZERO }
        };
    }

    fn advance(&mut self, now: Time) {
        self.known = None;
        self.search = if self.fails - self.current <= CLOSE_ENOUGH {
            Search::Complete {
                again: now + self.raise_after,
            }
        } else {
            let size = self.current + (self.fails - self.current) / 2;
            Search::Wanted { size, losses: 0 }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Time = Time::from_nanos(1_000_000_000);

    /// Answers probes as a path that carries `passes` would; returns how many were sent.
    fn run(m: &mut Mtud, now: Time, passes: u16) -> u32 {
        let mut probes = 0;
        while let Some(size) = m.poll(now) {
            probes += 1;
            m.on_probe_sent();
            assert_eq!(m.poll(now), None, "one probe at a time");
            if size <= passes {
                m.on_probe_acked(now, size)
            } else {
                m.on_probe_lost(now, size)
            }
        }
        probes
    }

    #[test]
    fn the_interface_may_take_other_sizes_later() {
        let mut m = Mtud::new(1472);
        run(&mut m, NOW, u16::MAX);
        m.set_max(8972);
        assert_eq!(m.current(), 1472);
        assert_eq!(run(&mut m, NOW, u16::MAX), 1);
        assert_eq!(m.current(), 8972);
        m.set_max(1300);
        assert_eq!((m.current(), m.poll(NOW)), (1300, None));
        // A probe of before says nothing any more.
        m.on_probe_acked(NOW, 8972);
        assert_eq!(m.current(), 1300);
        m.set_max(40);
        assert_eq!(m.current(), BASE, "nothing smaller is made");
    }

    #[test]
    fn the_interface_mtu_is_tried_first() {
        let mut m = Mtud::new(1472);
        assert_eq!(run(&mut m, NOW, 1472), 1);
        assert_eq!((m.current(), m.due_at()), (1472, None));
    }

    #[test]
    fn any_size_is_found_closely() {
        for max in [1200, 1216, 1472, 8972, 65507, u16::MAX] {
            for passes in (1200..=max).step_by(67) {
                let mut m = Mtud::new(max);
                let probes = run(&mut m, NOW, passes);
                assert!(m.current() <= passes && m.current() + CLOSE_ENOUGH > passes);
                assert!(probes <= 45, "{probes}");
            }
        }
    }

    #[test]
    fn the_largest_size_is_tried_again_soon_and_ever_more_seldom() {
        let mut m = Mtud::new(1472);
        let mut now = NOW;
        run(&mut m, now, 1300);
        let found = m.current();
        for wait in [5, 10, 20, 40, 80, 160, 320].map(Duration::from_secs) {
            assert_eq!(m.due_at(), Some(now + wait));
            now += wait;
            assert_eq!(run(&mut m, now, 1300), 1, "one probe, no search");
            assert_eq!(m.current(), found);
        }
        for _ in 0..2 {
            assert_eq!(m.due_at(), None, "nothing large has gone by it");
            m.on_acked(found);
            assert_eq!(m.due_at(), Some(now + RAISE_AFTER));
            now += RAISE_AFTER;
            assert!(run(&mut m, now, 1400) > 3, "a search");
            assert!((1385..=1400).contains(&m.current()));
        }
        now += RAISE_AFTER;
        assert_eq!(run(&mut m, now, 1472), 0);
        m.on_acked(found);
        assert_eq!(run(&mut m, now, 1472), 1);
        assert_eq!((m.current(), m.due_at()), (1472, None));
        // Another interface is another matter.
        m.set_max(8972);
        run(&mut m, now, 1472);
        assert_eq!(m.due_at(), Some(now + RETRY_AFTER));
        assert_eq!(run(&mut m, now + RETRY_AFTER, 8972), 1);
        assert_eq!(m.current(), 8972);
    }

    #[test]
    fn the_largest_size_refused_when_tried_again_changes_nothing() {
        let mut m = Mtud::new(1472);
        run(&mut m, NOW, 1300);
        let found = m.current();
        let now = NOW + RETRY_AFTER;
        assert_eq!(m.poll(now), Some(1472));
        m.on_too_big(now, 1472);
        assert_eq!((m.current(), m.poll(now)), (found, None));
    }

    #[test]
    fn a_black_hole_is_noticed_and_random_loss_is_none() {
        let mut m = Mtud::new(1472);
        run(&mut m, NOW, 1472);
        for _ in 0..100 {
            m.on_lost(NOW, 1472);
            m.on_lost(NOW, 1472);
            m.on_lost(NOW, 600);
            m.on_acked(1472);
        }
        assert_eq!(m.current(), 1472);
        for _ in 0..BLACK_HOLE_LOSSES {
            m.on_acked(1300);
            m.on_lost(NOW, 1472);
        }
        assert_eq!(m.current(), 1200);
        run(&mut m, NOW, 1400);
        assert!((1385..=1400).contains(&m.current()));
    }

    #[test]
    fn what_the_system_refuses_is_not_tried_again() {
        let mut m = Mtud::new(1472);
        m.poll(NOW);
        m.on_too_big(NOW, 1472);
        run(&mut m, NOW, 1472);
        assert!((1456..1472).contains(&m.current()), "{}", m.current());
        m.on_too_big(NOW, 1400);
        assert_eq!(m.current(), 1200);
        run(&mut m, NOW, 1472);
        assert!((1384..1400).contains(&m.current()));
    }

    #[test]
    fn nothing_is_searched_for_on_a_small_interface() {
        let mut m = Mtud::new(1000);
        assert_eq!((m.current(), m.poll(NOW), m.due_at()), (BASE, None, None));
    }
}
