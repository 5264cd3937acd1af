//! Brings the kernel to what is wanted, and leaves it.

use super::Daemon;
use crate::wakers::Task;

/// What [`Daemon::steer`] did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Steered {
    /// Changes of the kernel's state. 0: everything was as wanted.
    pub(crate) steps: u64,
    /// Nothing else was wanted than when the kernel was last brought to it: changes undo what others did.
    pub(crate) settled: bool,
}

impl Daemon {
    /// Brings the kernel to what is wanted. A bump that nothing uses any more stays, see
    /// [`retire`](Self::retire).
    pub(crate) async fn steer(&self) -> anyhow::Result<Steered> {
        // Before the kernel has new connections go by a bump.
        self.tell_flow_schedulers()?;
        let done = self.steer_once().await;
        let why = done.as_ref().err().map(|error| format!("{error:#}"));
        if let Err(error) = &done
            && matches!(
                error.downcast_ref(),
                Some(dibs_policy::Error::TimedOut { .. })
            )
        {
            self.timeouts.update(|count| count + 1);
        }
        if why.is_some() {
            self.wakers.wake(Task::Repair);
        }
        *self.amiss.borrow_mut() = why;
        done
    }

    /// Why the kernel is not as it is wanted, if that is known.
    pub(crate) fn amiss(&self) -> Option<String> {
        self.amiss.borrow().clone()
    }

    async fn steer_once(&self) -> anyhow::Result<Steered> {
        let before = self.timeouts.get();
        let mut steerer = self.steerer.lock().await;
        // What kept whoever was there before us would keep us as long.
        if let Some(why) = self.amiss().filter(|_| self.timeouts.get() > before) {
            anyhow::bail!(why);
        }
        if self.let_go.get() {
            return Ok(Steered::default());
        }
        let (wish, pins, fresh, settled) = {
            let state = self.state.borrow();
            let fresh = state.installed.is_empty() && !state.in_use().is_empty();
            let settled = !state.pins_are_stale() && state.is_installed();
            (state.wish(&self.config), state.pins(), fresh, settled)
        };
        if let Err(error) = self.backstop.lock().await.narrow(&wish).await {
            tracing::warn!("{error}");
        }
        let report = steerer.set(&wish).await?;
        let undone = u64::from(self.set_backstop(&wish).await);
        {
            let mut state = self.state.borrow_mut();
            for bump in &wish.bumps {
                state.installed.entry(bump.id).or_default();
            }
            state.pinned = pins;
        }
        // While nothing was installed, the kernel forgot what was chosen.
        if fresh {
            self.mark_all_choices().await;
        }
        Ok(Steered {
            steps: report.steps.len() as u64 + undone,
            settled,
        })
    }

    /// Leaves the kernel as it is from now on, whatever becomes of it: TUNs that go with the daemon are not
    /// to be missed.
    pub(crate) fn let_go(&self) {
        self.let_go.set(true);
    }

    /// Removes everything of ours from the kernel; what is still in use comes back with the next
    /// [`steer`](Self::steer), unless this is `for_good`.
    pub(crate) async fn remove_all(&self, for_good: bool) -> anyhow::Result<()> {
        let mut steerer = self.steerer.lock().await;
        self.let_go.set(for_good);
        {
            let mut state = self.state.borrow_mut();
            state.installed.clear();
            state.pinned.clear();
            state.conns.update_all(|_, conn| {
                conn.handle_followed(None);
            });
        }
        self.backstop.lock().await.remove().await?;
        steerer.cleanup(&self.config).await.map(drop)
    }

    /// Has everything that is in use installed; quick if it is.
    pub(crate) async fn install(&self) -> anyhow::Result<()> {
        let installed = self.state.borrow().is_installed();
        if !installed {
            self.steer().await?;
        }
        Ok(())
    }

    /// Removes bumps that two sweeps in a row found unused (what is on its way has arrived by then), and
    /// brings rules for single connections up to date.
    pub(crate) async fn retire(&self) -> anyhow::Result<()> {
        let due = {
            let mut state = self.state.borrow_mut();
            let used = state.in_use();
            // While a peer is asked for its part, the connection stands where it stood: on any of them.
            let asked = state.conns.choices().any(|(_, choice)| choice.pending);
            for (bump, unused) in &mut state.installed {
                *unused = match asked || used.contains(bump) {
                    true => 0,
                    false => *unused + 1,
                };
            }
            let before = state.installed.len();
            state.installed.retain(|_, unused| *unused < 2);
            state.installed.len() < before || state.pins_are_stale()
        };
        if due {
            self.steer().await?;
        }
        Ok(())
    }
}
