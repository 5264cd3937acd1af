//! Follows the conntrack table while anything is installed. What follows from its events says
//! [`dibs_switch::engine::entries`].

use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use dibs_policy::conntrack::{Connection, Event, Events};
use dibs_switch::engine::entries::{self, Marked, Passing};
use tokio::time::sleep;

use crate::host::live::Live;
use crate::host::log::or_warn;
use crate::kernel::gateway;
use crate::switch::{Daemon, locking};

/// Before what failed is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Follows the table for good.
pub(crate) async fn follow(daemon: Rc<Daemon>) {
    loop {
        let Err(error) = follow_once(&daemon).await;
        daemon.events.note("follow the conntrack table", Err(error));
        sleep(RETRY).await;
    }
}

async fn follow_once(daemon: &Rc<Daemon>) -> anyhow::Result<Infallible> {
    let mut events = Events::open()?;
    follow_apart(daemon, entries::catch_up(&**daemon).await?);
    daemon
        .events
        .note("follow the conntrack table", anyhow::Ok(()));
    loop {
        let marked = match events.next().await? {
            Event::Destroyed(entry) => {
                let passing = passing(daemon, &entry);
                entries::handle_destroyed(&**daemon, &entry.ends(), passing).await?;
                Vec::new()
            }
            Event::New(found) => {
                let entry = locking::entry(daemon, &found);
                Vec::from_iter(entries::handle_new(&**daemon, &found.ends(), entry).await?)
            }
            Event::Update(found) => {
                let entry = locking::entry(daemon, &found);
                Vec::from_iter(entries::handle_update(&**daemon, &found.ends(), entry).await?)
            }
            Event::Lost => entries::catch_up(&**daemon).await?,
        };
        follow_apart(daemon, marked);
    }
}

fn passing(daemon: &Daemon, entry: &Connection) -> Option<Passing> {
    let Live { pair, .. } = gateway::passing(daemon, entry)?;
    let goes_on = gateway::was_passing(entry);
    Some(Passing { pair, goes_on })
}

/// Has marks of other programs followed while more events come.
fn follow_apart(daemon: &Rc<Daemon>, marked: Vec<Marked<Live>>) {
    for marked in marked {
        let daemon = Rc::clone(daemon);
        tokio::task::spawn_local(async move {
            let _turn = match marked.chosen {
                true => Some(daemon.users.own_turn().await),
                false => None,
            };
            or_warn(entries::follow(&*daemon, marked).await);
        });
    }
}
