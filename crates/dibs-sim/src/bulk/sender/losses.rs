//! What a sender makes of losses: Linux's state machine (`tcp_fastretrans_alert`), with RACK (RFC 8985),
//! proportional rate reduction (RFC 6937), and the ways in which it takes a reduction back.

use std::time::Duration;

use dibs_core::Time;

use super::Sender;
use crate::bulk::event::{NO_THRESHOLD, State};
use crate::bulk::recovery::Signs;
use crate::bulk::segment::MSS;

/// Recoveries for which RACK's window stays wider than at first (RFC 8985, 6.2).
const WIDE_FOR: u32 = 16;

impl Sender {
    /// Draws the consequences of an acknowledgement; returns how many segments are newly thought lost.
    pub(super) fn recover(&mut self, now: Time, signs: &Signs) -> u64 {
        let news = &signs.news;
        if let Some(distance) = news.reordered {
            self.recovery.reordered = true;
            self.recovery.reordering = self.recovery.reordering.max(distance).min(300);
        }
        self.widen(signs);
        self.take_probed(signs);
        if signs.repeated {
            let left = self.recovery.undo_again;
            self.recovery.undo_again = left.map(|n| n.saturating_sub(1));
        }
        let plain = signs.advanced || signs.opened;
        let alert = news.sacked > 0 || signs.repeated;
        if plain && !alert && self.recovery.state == State::Open {
            return 0;
        }
        if self.recovery.state == State::Open {
            self.recovery.again_since = None;
        }
        let over = self.una() >= self.recovery.high * MSS;
        if over && self.recovery.state == State::Recovery {
            if self.may_undo(signs) {
                self.undo(false);
            }
            self.end_reduction();
        }
        match self.recovery.state {
            State::Recovery => self.go_on_recovering(now, signs),
            State::Loss => self.go_on_after_timeout(now, signs),
            _ => {
                self.undo_if_all_came_twice();
                self.look_for_losses(now)
            }
        }
    }

    fn go_on_recovering(&mut self, now: Time, signs: &Signs) -> u64 {
        if signs.advanced && self.recovery.undoable && self.came_late(signs) {
            // It was late, and not lost (`tcp_try_undo_partial`).
            self.recovery.reordered = true;
            if self.board.again() == 0 {
                self.undo(true);
                self.recovery.state = State::Open;
            }
            return 0;
        }
        self.undo_if_all_came_twice();
        self.look_for_losses(now)
    }

    fn go_on_after_timeout(&mut self, now: Time, signs: &Signs) -> u64 {
        let original = signs.news.original && self.recovery.undoable;
        let late = signs.advanced && self.may_undo(signs);
        if original || late {
            self.undo(true);
            self.recovery.state = State::Open;
        } else if self.una() >= self.recovery.high * MSS {
            self.recovery.state = State::Open;
            self.recovery.undoable = false;
        }
        let (lost, again, wait) = self.board.detect(now, self.reorder_window());
        self.timers.reorder = wait.map(|wait| now + wait);
        if self.recovery.state == State::Open || again {
            self.enter_if_lost();
        }
        lost
    }

    fn look_for_losses(&mut self, now: Time) -> u64 {
        let (lost, _, wait) = self.board.detect(now, self.reorder_window());
        self.timers.reorder = wait.map(|wait| now + wait);
        if self.recovery.state < State::Recovery {
            self.enter_if_lost();
        }
        lost
    }

    fn enter_if_lost(&mut self) {
        if self.board.lost() > 0 {
            return self.enter_recovery();
        }
        let open = self.board.sacked() == 0;
        self.recovery.state = if open { State::Open } else { State::Disorder };
        self.recovery.high = self.board.next();
    }

    fn enter_recovery(&mut self) {
        self.begin_undo();
        self.begin_reduction();
        self.recovery.steps_kept = self.recovery.steps_kept.saturating_sub(1);
        self.recovery.high = self.board.next();
        self.probed = None;
        self.timers.probe = None;
        self.recovery.state = State::Recovery;
        self.stats.recoveries += 1;
    }

    fn begin_undo(&mut self) {
        self.recovery.undoable = true;
        let again = self.board.again();
        self.recovery.undo_again = Some(again).filter(|n| *n > 0);
        if again == 0 {
            self.recovery.again_since = None;
        }
    }

    fn begin_reduction(&mut self) {
        self.recovery.prior_threshold = self.window.ssthresh;
        self.window.prior = self.window.cwnd;
        self.recovery.prr = (0, 0, self.window.cwnd.max(1));
        self.window.ssthresh = self.cubic.reduce(self.window.cwnd);
    }

    fn end_reduction(&mut self) {
        if self.window.ssthresh < NO_THRESHOLD && self.recovery.undoable {
            self.window.cwnd = self.window.ssthresh;
        }
        self.recovery.state = State::Open;
        self.recovery.undoable = false;
    }

    /// The window while it is reduced (RFC 6937; `tcp_cwnd_reduction`).
    pub(super) fn reduce(&mut self, delivered: u64, lost: u64, advanced: bool) {
        if self.recovery.state != State::Recovery || delivered == 0 {
            return;
        }
        let in_flight = self.board.in_flight();
        let threshold = self.window.ssthresh;
        let (all, sent, before) = &mut self.recovery.prr;
        *all += delivered;
        let may = match threshold.checked_sub(in_flight) {
            None => (threshold * *all).div_ceil(*before).saturating_sub(*sent),
            Some(room) => {
                let open = all.saturating_sub(*sent).max(delivered);
                (open + u64::from(advanced && lost == 0)).min(room)
            }
        };
        self.window.cwnd = in_flight + may.max(u64::from(*sent == 0));
    }

    /// RACK's window (`tcp_rack_reo_wnd`).
    fn reorder_window(&self) -> Duration {
        let recovering = self.recovery.state >= State::Recovery;
        if !self.recovery.reordered
            && (recovering || self.board.sacked() >= self.recovery.reordering)
        {
            return Duration::ZERO;
        }
        let quarter = self.rtt.least().unwrap_or_default() / 4;
        (quarter * self.recovery.steps).min(self.rtt.smoothed())
    }

    /// Where something was sent again that had not been lost, RACK waits longer (RFC 8985, 6.2, step 4).
    fn widen(&mut self, signs: &Signs) {
        let r = &mut self.recovery;
        let Some((_, newest)) = signs.news.newest else {
            return;
        };
        if signs.repeated && newest.delivered >= r.steps_round {
            r.steps = (r.steps + 1).min(255);
            r.steps_kept = WIDE_FOR;
            r.steps_round = self.delivered;
        } else if r.steps_kept == 0 {
            r.steps = 1;
        }
    }

    /// The probe of the tail is acknowledged: if it had been lost before, so was something else (RFC 8985, 7.4.2).
    fn take_probed(&mut self, signs: &Signs) {
        let Some((end, again)) = self.probed.filter(|probed| self.una() >= probed.0 * MSS) else {
            return;
        };
        if !again || signs.repeated {
            self.probed = None;
        } else if self.una() > end * MSS {
            self.probed = None;
            self.begin_reduction();
            self.window.cwnd = self.window.ssthresh;
        } else if !signs.advanced && !signs.opened && signs.news.sacked == 0 {
            self.probed = None;
        }
    }

    /// RACK has waited for what may have been late.
    pub(super) fn on_reorder_timeout(&mut self, now: Time) {
        let (lost, _, wait) = self.board.detect(now, self.reorder_window());
        self.timers.reorder = wait.map(|wait| now + wait);
        if lost > 0 && self.recovery.state != State::Recovery {
            self.enter_recovery();
            self.reduce(1, lost, false);
        }
    }

    /// Nothing was heard for long (`tcp_enter_loss`).
    pub(super) fn on_timeout(&mut self, now: Time) {
        if self.board.out() == 0 {
            self.timers.timeout = None;
            return;
        }
        self.stats.timeouts += 1;
        self.board.time_out(now);
        let state = self.recovery.state;
        if state <= State::Disorder || self.una() >= self.recovery.high * MSS {
            self.recovery.prior_threshold = self.window.ssthresh;
            self.window.prior = self.window.cwnd;
            self.window.ssthresh = self.cubic.reduce(self.window.cwnd);
            self.begin_undo();
        }
        self.cubic.reset(now);
        self.window.cwnd = self.board.in_flight() + 1;
        self.recovery.state = State::Loss;
        self.recovery.high = self.board.next();
        (self.timers.probe, self.probed, self.timers.reorder) = (None, None, None);
        self.rtt.back_off();
        self.timers.timeout = Some(now + self.rtt.timeout());
    }

    /// Whether an acknowledgement is for what was sent first, before anything was sent again (Eifel, RFC 3522).
    fn came_late(&self, signs: &Signs) -> bool {
        let since = self.recovery.again_since;
        since.is_some_and(|since| (signs.echo.wrapping_sub(since) as i32) < 0)
    }

    fn may_undo(&self, signs: &Signs) -> bool {
        self.recovery.undoable && (self.recovery.undo_again == Some(0) || self.came_late(signs))
    }

    /// All that was sent again came twice.
    fn undo_if_all_came_twice(&mut self) {
        if self.recovery.undoable && self.recovery.undo_again == Some(0) {
            self.undo(false);
            if self.recovery.state == State::Recovery {
                self.recovery.state = State::Open;
            }
        }
    }

    /// Takes the reduction back.
    fn undo(&mut self, unmark: bool) {
        if unmark {
            self.board.unmark();
        }
        self.window.cwnd = self.window.cwnd.max(self.window.prior);
        self.window.ssthresh = self.window.ssthresh.max(self.recovery.prior_threshold);
        self.recovery.undoable = false;
        self.recovery.again_since = None;
        self.stats.undone += 1;
    }
}
