//! Names of endpoints are looked up, by the system's resolver and away from this thread.

use std::net::IpAddr;
use std::rc::Rc;
use std::time::Instant;

use tokio::net::lookup_host;
use tokio::time::sleep_until;

use crate::data::Gone;
use crate::host::endpoints::Lookup;
use crate::switch::Daemon;
use crate::switch::wakers::Task;

/// Begins each error of the standard library's.
const PREFIX: &str = "failed to lookup address information: ";

/// Looks names up when that is due, until the data path ends.
pub(crate) async fn keep(daemon: Rc<Daemon>) {
    if daemon.endpoints.are_addresses() {
        return;
    }
    while look(&daemon).await.is_ok() {
        let now = Instant::now();
        match daemon.endpoints.due(now) {
            Some(due) => tokio::select! {
                () = daemon.wakers.woken(Task::Names) => {}
                () = sleep_until(due.into()) => {}
            },
            None => daemon.wakers.woken(Task::Names).await,
        }
    }
}

/// Sees which peers are silent, and begins the lookups that are due.
async fn look(daemon: &Rc<Daemon>) -> Result<(), Gone> {
    let snapshot = daemon.driver.snapshot().await?;
    let now = Instant::now();
    daemon.endpoints.note_silence(now, |peer, path| {
        let is_usable = daemon.host.lack_of_path(path).is_none()
            && daemon.preferences.borrow().forbids(path).is_none();
        let mut there = { snapshot.paths.iter() }.filter(|of| (of.peer, of.local) == (peer, path));
        is_usable && !there.any(|path| path.state == "active")
    });
    while let Some(lookup) = daemon.endpoints.poll_lookup(now) {
        let daemon = Rc::clone(daemon);
        tokio::task::spawn_local(async move {
            let answer = resolved(&lookup).await;
            let now = Instant::now();
            daemon.endpoints.note_answer(now, lookup.number, answer);
            // Without the data path there is nobody to be told.
            let _ = tell(&daemon);
            daemon.wakers.wake(Task::Names);
        });
    }
    tell(daemon)
}

/// Tells the data path where peers listen, and the user what is wrong with names.
fn tell(daemon: &Daemon) -> Result<(), Gone> {
    let (config, inventory) = (&daemon.config, daemon.host.inventory());
    for news in daemon.endpoints.tell(config, &inventory, &daemon.driver)? {
        tracing::info!("{news}");
    }
    let faults = daemon.endpoints.faults(config, &inventory);
    daemon.events.warn_while("names of endpoints", faults);
    Ok(())
}

/// The resolver's answer.
async fn resolved(lookup: &Lookup) -> Result<Vec<IpAddr>, String> {
    let Lookup { host, port, .. } = lookup;
    match lookup_host((host.as_str(), *port)).await {
        Ok(found) => Ok(found.map(|address| address.ip()).collect()),
        Err(error) => {
            let why = error.to_string();
            Err(why.strip_prefix(PREFIX).unwrap_or(&why).to_owned())
        }
    }
}
