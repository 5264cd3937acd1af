//! The kernel's side of this host: what steers it, kernel state and TUNs together, what nftables and conntrack are told, and how
//! it stands.

pub(crate) mod connections;
pub(crate) mod devices;

use std::cell::{Cell, RefCell};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use dibs_config::{Config, Fail};
use dibs_control::{BackstopInfo, BackstopState};
use dibs_io::Tun;
use dibs_policy::conntrack::Conntrack;
use dibs_policy::{
    Backstop, BumpRoute, Counting, Desired, DeviceOwner, Error, Report, Standing, Steering,
    Strength, System,
};
use dibs_settings::BumpId;
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::timeout;

use crate::data::Driver;
use crate::data::bumps::marks;
use crate::host::Host;
use crate::host::process::wall;

/// What is counted by the kernel is asked for as often.
const DROPPED_FOR: Duration = Duration::from_secs(1);
/// Who asks for the status is told without what iptables does not say within this time.
const COUNTED_WITHIN: Duration = Duration::from_secs(2);

/// What the kernel dropped for us.
#[derive(Clone, Debug, Default)]
pub(crate) struct Dropped {
    /// By reason.
    pub(crate) counts: BTreeMap<&'static str, u64>,
    /// When that was counted, in seconds since 1970.
    pub(crate) at: Option<f64>,
    /// Why it is not known what iptables dropped lately.
    pub(crate) unknown: Option<String>,
}

/// What tells the kernel what, one task at a time, and what is known of how that went. Whoever needs more than one of its
/// locks takes them in the order of the fields.
pub(crate) struct Kernel {
    host: Rc<Host>,
    steerer: Mutex<Steerer>,
    /// Held while all connections are looked through, of which there may be thousands: one list at a time.
    looking: Mutex<()>,
    /// Held while the kernel is told of a choice or a lock.
    marking: Mutex<()>,
    /// What stands when others flush the firewall. Held while a connection's mark and what the
    /// backstop knows of it change together.
    backstop: Mutex<Backstop>,
    conntracks: Conntracks,
    /// It is left alone from now on: nothing is steered any more.
    let_go: Cell<bool>,
    /// Why it could not be brought to what is wanted the last time.
    amiss: RefCell<Option<String>>,
    /// How often a program that steers did not come to its end.
    timeouts: Cell<u64>,
    /// Things that others removed and we put back.
    restored: Cell<u64>,
    dropped: Fresh<Dropped>,
}

impl Kernel {
    /// Steers by these.
    pub(crate) fn new(host: Rc<Host>, steerer: Steerer, backstop: Backstop) -> Self {
        Self {
            host,
            steerer: Mutex::new(steerer),
            looking: Mutex::default(),
            marking: Mutex::default(),
            backstop: Mutex::new(backstop),
            conntracks: Conntracks::default(),
            let_go: Cell::default(),
            amiss: RefCell::default(),
            timeouts: Cell::default(),
            restored: Cell::default(),
            dropped: Fresh::new(DROPPED_FOR),
        }
    }

    /// The host that it is of.
    pub(crate) fn host(&self) -> &Host {
        &self.host
    }

    /// What steers, for one task at a time.
    pub(crate) async fn steerer(&self) -> MutexGuard<'_, Steerer> {
        self.steerer.lock().await
    }

    /// As [`steerer`](Self::steerer), for who is to bring the kernel to what is wanted; none if it is left alone.
    ///
    /// # Errors
    /// What kept whoever was there before would keep the caller as long.
    pub(crate) async fn begin(&self) -> anyhow::Result<Option<MutexGuard<'_, Steerer>>> {
        let before = self.timeouts.get();
        let steerer = self.steerer.lock().await;
        if let Some(why) = self.amiss().filter(|_| self.timeouts.get() > before) {
            anyhow::bail!(why);
        }
        Ok((!self.let_go.get()).then_some(steerer))
    }

    /// Notes what came of bringing the kernel to what is wanted.
    pub(crate) fn note_steered<T>(&self, done: &anyhow::Result<T>) {
        let error = done.as_ref().err();
        let timed_out =
            |error: &&anyhow::Error| matches!(error.downcast_ref(), Some(Error::TimedOut { .. }));
        if error.is_some_and(|error| timed_out(&error)) {
            self.timeouts.update(|count| count + 1);
        }
        self.amiss.replace(error.map(|error| format!("{error:#}")));
    }

    /// Why the kernel is not as it is wanted, if that is known.
    pub(crate) fn amiss(&self) -> Option<String> {
        self.amiss.borrow().clone()
    }

    /// Leaves the kernel as it is from now on, whatever becomes of it: TUNs that go with the daemon are not
    /// to be missed.
    pub(crate) fn let_go(&self) {
        self.let_go.set(true);
    }

    /// Notes that so many things were put back.
    pub(crate) fn note_restored(&self, things: u64) {
        self.restored.update(|count| count + things);
    }

    /// How many things were put back.
    pub(crate) fn restored(&self) -> u64 {
        self.restored.get()
    }

    /// A turn to look through all connections.
    pub(crate) async fn looking(&self) -> MutexGuard<'_, ()> {
        self.looking.lock().await
    }

    /// A turn to tell the kernel of choices and locks.
    pub(crate) async fn marking(&self) -> MutexGuard<'_, ()> {
        self.marking.lock().await
    }

    /// What stands when others flush the firewall, for one task at a time.
    pub(crate) async fn backstop(&self) -> MutexGuard<'_, Backstop> {
        self.backstop.lock().await
    }

    /// How the backstop stands.
    pub(crate) async fn standing(&self) -> Standing {
        self.backstop.lock().await.standing().clone()
    }

    /// Why the backstop would not be taken of all that is wanted. Where steering fails open, nothing is backed; where
    /// there is no nftables, nothing can be, which `status` says.
    pub(crate) async fn unbacked(&self, wish: &Desired) -> Option<String> {
        if self.host.config().daemon.fail == Fail::Open {
            return None;
        }
        match self.backstop.lock().await.check(wish).await {
            Ok(()) | Err(Error::NoNftables) => None,
            Err(error) => Some(error.to_string()),
        }
    }

    /// Something to ask conntrack by.
    pub(crate) fn conntrack(&self) -> Result<Asking<'_>, Error> {
        self.conntracks.get()
    }

    /// What the kernel dropped for us, as it was counted lately.
    pub(crate) async fn dropped(&self) -> Dropped {
        let count = async |before| self.count_dropped(before).await;
        self.dropped.get(Instant::now(), count).await
    }

    /// Has the kernel's counters read, while others may steer: what a chain counted that is written anew in that
    /// moment is missing, so that no count is taken for less than it was `before`.
    async fn count_dropped(&self, before: Option<Dropped>) -> Dropped {
        let mut dropped = before.unwrap_or_default();
        let at = wall();
        let counted = timeout(COUNTED_WITHIN, async {
            let counting = self.steerer.lock().await.counting();
            counting.drops().await
        });
        let mut note = |name, count: u64| {
            let known = dropped.counts.entry(name).or_default();
            *known = count.max(*known);
        };
        let unknown = match counted.await {
            Ok(Ok(drops)) => {
                drops.iter().for_each(|(name, count)| note(name, count));
                None
            }
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("iptables is busy".to_owned()),
        };
        let plain = self.backstop.lock().await.dropped().await;
        note(
            "plain_dropped",
            plain.unwrap_or_else(|error| {
                tracing::debug!("{error}");
                0
            }),
        );
        if unknown.is_none() {
            dropped.at = Some(at);
        }
        dropped.unknown = unknown;
        dropped
    }
}

/// For the user.
pub(crate) fn backstop_info(standing: &Standing) -> BackstopInfo {
    let (state, reason) = match standing {
        Standing::Idle => (BackstopState::Idle, None),
        Standing::Stands(Strength::Lasting) => (BackstopState::Lasting, None),
        Standing::Stands(Strength::WhileRunning) => (BackstopState::WhileRunning, None),
        Standing::Stands(Strength::Shared) => (BackstopState::Shared, None),
        Standing::Missing => {
            let why = Error::NoNftables.to_string();
            (BackstopState::Missing, Some(why))
        }
        Standing::Failed(why) => (BackstopState::Failed, Some(why.clone())),
    };
    BackstopInfo { state, reason }
}

/// Those that are kept open, at most.
const MOST_KEPT: usize = 4;

/// What conntrack is asked by, while nobody does.
#[derive(Default)]
pub(crate) struct Conntracks(RefCell<Vec<Conntrack>>);

impl Conntracks {
    /// Something to ask conntrack by.
    pub(crate) fn get(&self) -> Result<Asking<'_>, dibs_policy::Error> {
        let kept = self.0.borrow_mut().pop();
        let conntrack = Some(kept.map_or_else(Conntrack::open, Ok)?);
        Ok(Asking {
            kept: &self.0,
            conntrack,
        })
    }
}

/// One in use.
pub(crate) struct Asking<'a> {
    kept: &'a RefCell<Vec<Conntrack>>,
    conntrack: Option<Conntrack>,
}

impl Deref for Asking<'_> {
    type Target = Conntrack;

    fn deref(&self) -> &Conntrack {
        self.conntrack
            .as_ref()
            .expect("it is given back at the end")
    }
}

impl DerefMut for Asking<'_> {
    fn deref_mut(&mut self) -> &mut Conntrack {
        self.conntrack
            .as_mut()
            .expect("it is given back at the end")
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let mut kept = self.kept.borrow_mut();
        if kept.len() < MOST_KEPT {
            kept.extend(self.conntrack.take().filter(Conntrack::is_idle));
        }
    }
}

/// Keeps what was found out last.
pub(crate) struct Fresh<T> {
    keep: Duration,
    last: Mutex<Option<(Instant, T)>>,
}

impl<T: Clone> Fresh<T> {
    /// Finds out anew once what is known is older than `keep`.
    pub(crate) fn new(keep: Duration) -> Self {
        Self {
            keep,
            last: Mutex::default(),
        }
    }

    /// What is known at `now`. `find` is given what was known before; meanwhile others wait, for what it finds.
    /// Who does not want to wait for so long leaves what was known to the next.
    pub(crate) async fn get(&self, now: Instant, find: impl AsyncFnOnce(Option<T>) -> T) -> T {
        let mut last = self.last.lock().await;
        let known = match &mut *last {
            Some((at, known)) => {
                if now.saturating_duration_since(*at) < self.keep {
                    return known.clone();
                }
                // The next attempt is as far away, should this one be given up.
                *at = now;
                Some(known.clone())
            }
            None => None,
        };
        let found = find(known).await;
        *last = Some((now, found.clone()));
        found
    }
}

/// No real route has a larger MTU, so that a switch never makes a segment too long.
const TUN_MTU: u16 = 65_535;

/// Steers for the daemon: kernel state and TUNs together.
pub(crate) struct Steerer {
    steering: Steering,
    driver: Driver,
    /// TUNs that the data path has not been given yet: what steers their connections does not stand.
    made: BTreeMap<BumpId, Tun>,
    /// Bumps whose TUN the data path has.
    open: BTreeSet<BumpId>,
    warned: BTreeSet<String>,
}

impl Steerer {
    /// Steering of this host. Needs a tokio runtime.
    pub(crate) fn new(driver: Driver) -> anyhow::Result<Self> {
        Ok(Self {
            steering: Steering::system(None)?,
            driver,
            made: BTreeMap::new(),
            open: BTreeSet::new(),
            warned: BTreeSet::new(),
        })
    }

    /// Brings TUNs and kernel to the wish. TUNs come before what leads to them, and go after it. The data
    /// path has them last: the answer to what came out of one earlier would leave in plain.
    pub(crate) async fn set(&mut self, desired: &Desired) -> anyhow::Result<Report> {
        let ours = |bump: &&BumpRoute| bump.owner == DeviceOwner::Ours;
        let wanted: BTreeSet<BumpId> = { desired.bumps.iter().filter(ours) }
            .map(|bump| bump.id)
            .collect();
        self.give_up_renamed().await?;
        self.made.retain(|id, _| wanted.contains(id));
        for &id in wanted.difference(&self.open) {
            if let Entry::Vacant(place) = self.made.entry(id) {
                place.insert(Tun::open(&id.tun_name(), TUN_MTU)?);
            }
        }
        let report = self.steering.set(desired).await?;
        while let Some((id, tun)) = self.made.pop_first() {
            let added = self.driver.add_tun(id, tun).await?;
            added.with_context(|| format!("watch {}", id.tun_name()))?;
            self.open.insert(id);
        }
        for step in &report.steps {
            tracing::debug!("steering: {}", step.to_string().trim_end());
        }
        for warning in &report.warnings {
            if self.warned.insert(warning.clone()) {
                tracing::warn!("{warning}");
            }
        }
        self.close(wanted).await?;
        Ok(report)
    }

    /// Closes TUNs that have another name now, or are in another namespace: nothing leads to them. One that
    /// was deleted the data path has noticed, and tells.
    async fn give_up_renamed(&mut self) -> anyhow::Result<()> {
        let is_gone = |name: &str| if_nametoindex(name) == Err(Errno::ENODEV);
        self.made.retain(|&id, _| !is_gone(&id.tun_name()));
        for id in self.open.clone() {
            let name = id.tun_name();
            if is_gone(&name)
                && let Some(tun) = self.driver.remove_tun(id).await?
            {
                tracing::warn!("device {name} was renamed or moved: dibsd makes it again");
                drop(tun);
                self.open.remove(&id);
            }
        }
        Ok(())
    }

    /// Removes what an earlier daemon left with another variant of iptables.
    pub(crate) async fn clear_others(&mut self) -> Result<(), dibs_policy::Error> {
        for step in self.steering.clear_others().await? {
            tracing::info!("left by an earlier run: {}", step.to_string().trim_end());
        }
        Ok(())
    }

    /// For looking only.
    pub(crate) fn steering(&mut self) -> &mut Steering {
        &mut self.steering
    }

    /// Whether the kernel tells when others change our chains.
    pub(crate) async fn is_told(&mut self) -> bool {
        self.steering.is_told().await.unwrap_or(false)
    }

    /// Forgets the TUN of a bump: the data path lost it. The next [`set`](Self::set) opens another.
    pub(crate) fn tun_lost(&mut self, bump: BumpId) {
        self.open.remove(&bump);
    }

    /// Counts what the kernel dropped for us, by reason.
    pub(crate) fn counting(&self) -> Counting<System> {
        self.steering.counting()
    }

    /// Removes everything of ours from the kernel, TUNs included.
    pub(crate) async fn cleanup(&mut self, config: &Config) -> anyhow::Result<Report> {
        let report = self.steering.cleanup(marks(config)).await?;
        self.made.clear();
        self.close(BTreeSet::new()).await?;
        Ok(report)
    }

    /// Closes the TUNs of all bumps but `wanted`.
    async fn close(&mut self, wanted: BTreeSet<BumpId>) -> anyhow::Result<()> {
        for &id in self.open.clone().difference(&wanted) {
            let tun = self.driver.remove_tun(id).await?;
            // Closing takes the kernel milliseconds, which is not the data path's business.
            drop(tun);
            self.open.remove(&id);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures_util::future::join_all;
    use tokio::task::yield_now;

    use super::*;

    const KEPT: Duration = Duration::from_secs(1);

    #[test]
    fn all_who_ask_within_a_time_cause_one_run() {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.expect("a runtime").block_on(async {
            let (fresh, runs) = (Fresh::new(KEPT), Cell::new(0));
            let start = Instant::now();
            let ask = async |after: Duration| {
                let run = async |before: Option<u32>| {
                    assert_eq!(before.unwrap_or(0), runs.get());
                    runs.set(runs.get() + 1);
                    yield_now().await;
                    runs.get()
                };
                fresh.get(start + after, run).await
            };
            // At once, while it runs, and afterwards.
            let many = join_all((0..100).map(|_| ask(Duration::ZERO))).await;
            assert!(many.iter().all(|found| *found == 1), "{many:?}");
            assert_eq!(ask(KEPT / 2).await, 1);
            let later = join_all((0..100).map(|n| ask(KEPT + KEPT / 200 * n))).await;
            assert!(later.iter().all(|found| *found == 2), "{later:?}");
            assert_eq!(runs.get(), 2);
        });
    }
}
