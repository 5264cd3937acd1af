//! Brings the kernel to what is wanted, and leaves it.

use crate::data::Gone;
use crate::host::process::or_warn;
use crate::rulebook::kept::Kept;
use crate::switch::wakers::Task;
use crate::switch::{Daemon, backstop, marking};

/// What [`steer`] did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Steered {
    /// Changes of the kernel's state. 0: everything was as wanted.
    pub(crate) steps: u64,
    /// Nothing else was wanted than when the kernel was last brought to it: changes undo what others did.
    pub(crate) settled: bool,
}

/// Brings the kernel to what is wanted. A bump that nothing uses any more stays, see
/// [`retire`].
pub(crate) async fn steer(daemon: &Daemon) -> anyhow::Result<Steered> {
    // Before the kernel has new connections go by a bump.
    tell_flow_schedulers(daemon)?;
    let done = steer_once(daemon).await;
    daemon.kernel.note_steered(&done);
    match done {
        Ok(_) => keep_for_guard(daemon).await,
        Err(_) => daemon.wakers.wake(Task::Repair),
    }
    done
}

/// Keeps what was carried out now for the guard. What `cleanup` suspends is in force again after a start.
async fn keep_for_guard(daemon: &Daemon) {
    let now = || {
        let rules = &daemon.state.borrow().rules;
        let inventory = daemon.host.inventory();
        let kept = || {
            let offset = rules.utc_offset();
            Kept::of(&daemon.config, &inventory, rules.in_force(), offset)
        };
        (!rules.is_suspended()).then(kept)
    };
    let directory = daemon.config.daemon.state_dir.clone();
    let kept = daemon.kept.keep(directory, now).await;
    daemon
        .events
        .note("keep what rules want for the guard", kept);
}

/// Tells the data path the schedulers of the rules that hold now.
pub(crate) fn tell_flow_schedulers(daemon: &Daemon) -> Result<(), Gone> {
    let state = daemon.state.borrow();
    let told = &daemon.flow_schedulers;
    told.tell(&daemon.driver, state.rules.active())
}

async fn steer_once(daemon: &Daemon) -> anyhow::Result<Steered> {
    let Some(mut steerer) = daemon.kernel.begin().await? else {
        return Ok(Steered::default());
    };
    let (wish, pins, fresh, settled) = {
        let state = daemon.state.borrow();
        let fresh = state.installed.is_empty() && !state.in_use().is_empty();
        let settled = !state.pins_are_stale() && state.is_installed();
        (
            state.wish(
                &daemon.config,
                &daemon.host.inventory(),
                &daemon.host.addresses(),
                None,
            ),
            state.pins(),
            fresh,
            settled,
        )
    };
    or_warn(daemon.kernel.backstop().await.narrow(&wish).await);
    let report = steerer.set(&wish).await?;
    let undone = u64::from(backstop::set(daemon, &wish).await);
    {
        let mut state = daemon.state.borrow_mut();
        for bump in &wish.bumps {
            state.installed.entry(bump.id).or_default();
        }
        state.pinned = pins;
    }
    // While nothing was installed, the kernel forgot what was chosen.
    if fresh {
        marking::mark_all_choices(daemon).await;
    }
    Ok(Steered {
        steps: report.steps.len() as u64 + undone,
        settled,
    })
}

/// Removes everything of ours from the kernel; what is still in use comes back with the next
/// [`steer`], unless this is `for_good`.
pub(crate) async fn remove_all(daemon: &Daemon, for_good: bool) -> anyhow::Result<()> {
    let mut steerer = daemon.kernel.steerer().await;
    if for_good {
        daemon.kernel.let_go();
    }
    {
        let mut state = daemon.state.borrow_mut();
        state.installed.clear();
        state.pinned.clear();
        state.conns.update_all(|_, conn| {
            conn.handle_followed(None);
        });
    }
    daemon.kernel.backstop().await.remove().await?;
    steerer.cleanup(&daemon.config).await.map(drop)
}

/// Has everything that is in use installed; quick if it is.
pub(crate) async fn install(daemon: &Daemon) -> anyhow::Result<()> {
    let installed = daemon.state.borrow().is_installed();
    if !installed {
        steer(daemon).await?;
    }
    Ok(())
}

/// Removes bumps that two sweeps in a row found unused (what is on its way has arrived by then), and
/// brings rules for single connections up to date.
pub(crate) async fn retire(daemon: &Daemon) -> anyhow::Result<()> {
    let due = {
        let mut state = daemon.state.borrow_mut();
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
        steer(daemon).await?;
    }
    Ok(())
}

/// Has the kernel brought to what is wanted, if anything is. `undone`: what is amiss was there before.
pub(crate) async fn repair(daemon: &Daemon, undone: bool) {
    let before = daemon.kernel.amiss();
    let none = daemon.state.borrow().installed.is_empty();
    if none && before.is_none() {
        return;
    }
    let undone = undone && !none;
    match steer(daemon).await {
        Ok(Steered { steps, settled }) if steps > 0 && settled && undone => {
            daemon.kernel.note_restored(steps);
            daemon.events.tell(
                "steering_restored",
                format!("another program changed the steering: put {steps} thing(s) back"),
                &[("steps", steps.to_string())],
            );
        }
        Ok(_) => {}
        Err(_) => {
            let now = daemon.kernel.amiss();
            if let Some(why) = now.as_ref().filter(|_| now != before) {
                tracing::error!("steering: {why}");
            }
        }
    }
}
