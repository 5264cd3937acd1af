//! Times of the lookups of a name: at first, when the network has changed, and as long as the name does not serve.

use std::time::{Duration, Instant};

/// The silence after which a name is looked up again.
const SILENCE: Duration = Duration::from_secs(10);
/// The longest wait between two lookups of a name that does not serve; it doubles up to this.
const LONGEST: Duration = Duration::from_secs(60);

/// See the module. Inputs are `note_*`, [`begin`](Self::begin) and [`end`](Self::end); [`due`](Self::due) says when to
/// begin.
#[derive(Debug)]
pub(super) struct Schedule {
    under_way: bool,
    /// The name was never looked up, or the network has changed since.
    at_once: bool,
    /// Since when nobody has answered where it leads, or it has led nowhere.
    silent_since: Option<Instant>,
    /// The end of the last lookup.
    looked_up: Option<Instant>,
    wait: Duration,
}

impl Schedule {
    pub(super) const fn new() -> Self {
        Self {
            under_way: false,
            at_once: true,
            silent_since: None,
            looked_up: None,
            wait: SILENCE,
        }
    }

    /// Takes note of whether it serves now.
    pub(super) fn note_silence(&mut self, now: Instant, is_silent: bool) {
        match is_silent {
            true => {
                self.silent_since.get_or_insert(now);
            }
            false => {
                self.silent_since = None;
                self.wait = SILENCE;
            }
        }
    }

    /// Another network may have another resolver, and others answers.
    pub(super) const fn note_network(&mut self) {
        self.at_once = true;
        self.wait = SILENCE;
    }

    /// Time of the next lookup; none: not before something is noted.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        if self.under_way {
            return None;
        }
        if self.at_once {
            return Some(now);
        }
        let silent = self.silent_since? + SILENCE;
        let again = self.looked_up.map(|at| at + self.wait);
        Some(again.map_or(silent, |again| silent.max(again)))
    }

    /// Begins a lookup.
    pub(super) fn begin(&mut self) {
        self.under_way = true;
        if !std::mem::take(&mut self.at_once) {
            self.wait = (self.wait * 2).min(LONGEST);
        }
    }

    /// The resolver has answered, or given up.
    pub(super) const fn end(&mut self, now: Instant) {
        self.under_way = false;
        self.looked_up = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks up whenever it is due from a second on until another; the seconds at which it did.
    fn lookups(schedule: &mut Schedule, zero: Instant, seconds: std::ops::Range<u64>) -> Vec<u64> {
        let mut at = Vec::new();
        for second in seconds {
            let now = zero + Duration::from_secs(second);
            if schedule.due(now).is_some_and(|due| due <= now) {
                schedule.begin();
                assert_eq!(schedule.due(now), None, "one lookup at a time");
                schedule.end(now);
                at.push(second);
            }
        }
        at
    }

    #[test]
    fn a_name_is_looked_up_at_first_and_while_nobody_answers() {
        let zero = Instant::now();
        let mut schedule = Schedule::new();
        schedule.note_silence(zero, true);
        assert_eq!(
            lookups(&mut schedule, zero, 0..240),
            [0, 10, 30, 70, 130, 190]
        );
        let answers = zero + Duration::from_secs(240);
        schedule.note_silence(answers, false);
        assert!(lookups(&mut schedule, zero, 240..1000).is_empty());
        schedule.note_silence(zero + Duration::from_secs(1000), true);
        assert_eq!(lookups(&mut schedule, zero, 1000..1040), [1010, 1030]);
    }

    #[test]
    fn a_change_of_the_network_is_asked_about_at_once() {
        let zero = Instant::now();
        let mut schedule = Schedule::new();
        schedule.note_silence(zero, true);
        lookups(&mut schedule, zero, 0..100);
        schedule.note_network();
        assert_eq!(lookups(&mut schedule, zero, 100..140), [100, 110, 130]);
        schedule.note_silence(zero, false);
        schedule.note_network();
        assert_eq!(lookups(&mut schedule, zero, 140..400), [140]);
    }
}
