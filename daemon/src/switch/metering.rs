//! Follows what paths carry whose volume is limited, and does what comes of that.

use std::rc::Rc;
use std::time::Duration;

use tokio::time::timeout;

use crate::data::Gone;
use crate::host::volumes::{Stage, Turn, write};
use crate::switch::Daemon;
use crate::switch::wakers::Task;

/// Between two looks at what was carried.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Follows what is carried, for good.
pub(crate) async fn keep(daemon: Rc<Daemon>) {
    loop {
        let due = daemon.wakers.woken(Task::Volumes);
        if daemon.preferences.borrow().limits_volumes() {
            let _ = timeout(LOOK_EVERY, due).await;
        } else {
            due.await;
        }
        if look(&daemon, false).await.is_err() {
            return;
        }
    }
}

/// Counts what was carried, and does what comes of it. `at_once`: writes it down whenever that was last done.
pub(crate) async fn look(daemon: &Daemon, at_once: bool) -> Result<(), Gone> {
    let snapshot = daemon.driver.snapshot().await?;
    let turns = {
        let mut preferences = daemon.preferences.borrow_mut();
        let turns = preferences.count_carried(&daemon.config, &snapshot);
        for turn in &turns {
            preferences.tell_usage(&daemon.driver, turn.path)?;
        }
        turns
    };
    turns.iter().for_each(|turn| tell(daemon, turn));
    let due = {
        let mut preferences = daemon.preferences.borrow_mut();
        preferences.volumes().due(at_once || !turns.is_empty())
    };
    if let Some((file, text)) = due {
        // A disk may be slow, and users are not to wait for it.
        let written = tokio::task::spawn_blocking(move || write(&file, &text)).await;
        let written = written.map_err(anyhow::Error::from).and_then(|done| done);
        if written.is_err() {
            daemon.preferences.borrow_mut().volumes().note_unwritten();
        }
        let what = "keep what paths carried this month";
        daemon.events.note(what, written);
    }
    Ok(())
}

/// Tells of a path that has used another part of its volume.
pub(crate) fn tell(daemon: &Daemon, turn: &Turn) {
    let name = &daemon.config.paths[turn.path].name;
    let volume = daemon.preferences.borrow().usage(turn.path).volume;
    let (Some(volume), true) = (volume, turn.now != turn.before) else {
        return;
    };
    let text = match turn.now {
        Stage::Spent => format!(
            "path {name} has used up its volume of {volume}: it carries no data until the month ends"
        ),
        Stage::Near if turn.before == Stage::Free => {
            format!("path {name} has used 90 % of its volume of {volume}")
        }
        _ => format!("path {name} has some of its volume of {volume} again"),
    };
    const KIND: &str = "path_volume";
    let fields = [
        ("path", name.clone()),
        ("volume", volume.bytes().to_string()),
    ];
    if turn.now > turn.before {
        tracing::warn!(dibs.event = KIND, dibs.path = name, "{text}");
        daemon.events.announce(KIND, text, &fields);
    } else {
        daemon.events.tell(KIND, text, &fields);
    }
}
