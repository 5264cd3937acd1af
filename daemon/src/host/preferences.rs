//! How the user would have the paths used: what the file says, and above it what `dibsctl` set, until that is reset.
//! It is kept here alone; the data path is told of each change.

use std::collections::BTreeMap;

use dibs_config::{Config, PathUsage, Prefer, Rate, Volume};
use dibs_control::{ErrorKind, Failure, Limit, PathChange, PathInfo, Preferred};
use dibs_core::node::NodeConfig;
use dibs_core::preference::{Unused, Usage};
use dibs_settings::{Hint, Role, Scheduler};
use serde::{Deserialize, Serialize};

use crate::data::{Driver, Gone, Snapshot};
use crate::host::volumes::{Month, Stage, Turn, Volumes};

/// Wishes that `dibsctl` set, as they are saved. Paths go by name: the file may have them in another order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Wishes {
    scheduler: Option<String>,
    prefer: Option<PreferWish>,
    paths: BTreeMap<String, PathWish>,
}

/// See [`Wishes`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum PreferWish {
    Nothing,
    Path {
        path: String,
        weight: u32,
        /// In thousandths.
        delta: u32,
    },
}

/// See [`Wishes`]; none: as in the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct PathWish {
    role: Option<String>,
    rate: Option<Limit>,
    volume: Option<Limit>,
}

/// What holds.
#[derive(Clone, Debug, PartialEq)]
struct InForce {
    scheduler: Scheduler,
    prefer: Option<Prefer>,
    /// By index of the configuration's paths.
    paths: Vec<PathUsage>,
}

impl Wishes {
    /// Those that can still be had with this file, and why the others cannot.
    fn fitting(mut self, config: &Config) -> (Self, Vec<String>) {
        let mut whys = Vec::new();
        let known = |name: &str| config.paths.iter().any(|path| path.name == name);
        if let Some(name) = self
            .scheduler
            .take_if(|name| name.parse::<Scheduler>().is_err())
        {
            whys.push(format!("there is no scheduler \"{}\"", name.escape_debug()));
        }
        let stale = |wish: &mut PreferWish| match wish {
            PreferWish::Nothing => false,
            PreferWish::Path {
                path,
                weight,
                delta,
            } => !known(path) || Prefer::check(*weight, from_thousandths(*delta)).is_err(),
        };
        if self.prefer.take_if(stale).is_some() {
            whys.push("the preferred path does not exist".to_owned());
        }
        self.paths.retain(|name, _| {
            if !known(name) {
                whys.push(format!("there is no path \"{}\"", name.escape_debug()));
            }
            known(name)
        });
        for wish in self.paths.values_mut() {
            if wish
                .role
                .take_if(|role| role.parse::<Role>().is_err())
                .is_some()
                | wish
                    .rate
                    .take_if(|rate| limit(*rate, Rate::new).is_err())
                    .is_some()
                | wish
                    .volume
                    .take_if(|volume| limit(*volume, Volume::new).is_err())
                    .is_some()
            {
                whys.push("a path cannot have such a role or limit".to_owned());
            }
        }
        (self, whys)
    }

    fn in_force(&self, config: &Config) -> InForce {
        let scheduler = self.scheduler.as_ref().and_then(|name| name.parse().ok());
        let prefer = match &self.prefer {
            None => config.prefer.clone(),
            Some(PreferWish::Nothing) => None,
            Some(PreferWish::Path {
                path,
                weight,
                delta,
            }) => Some(Prefer {
                path: path.clone(),
                weight: *weight,
                delta: from_thousandths(*delta),
            }),
        };
        let paths = config.paths.iter().map(|path| {
            let none = PathWish::default();
            let wish = self.paths.get(&path.name).unwrap_or(&none);
            let role = wish.role.as_ref().and_then(|role| role.parse().ok());
            let rate = wish.rate.and_then(|rate| limit(rate, Rate::new).ok());
            let volume = wish
                .volume
                .and_then(|volume| limit(volume, Volume::new).ok());
            PathUsage {
                role: role.unwrap_or(path.usage.role),
                rate: rate.unwrap_or(path.usage.rate),
                volume: volume.unwrap_or(path.usage.volume),
            }
        });
        InForce {
            scheduler: scheduler.unwrap_or(config.daemon.scheduler),
            prefer,
            paths: paths.collect(),
        }
    }

    /// Notes what a user wants.
    fn take(&mut self, config: &Config, change: PathChange) -> Result<(), Failure> {
        let bad = |message: String| Failure::new(ErrorKind::BadRequest, message);
        match change {
            PathChange::Prefer {
                path,
                weight,
                delta,
            } => {
                self.path(config, &path)?;
                let weight = weight.unwrap_or(Hint::WEIGHT);
                let delta = delta.unwrap_or(Hint::DELTA);
                Prefer::check(weight, delta).map_err(bad)?;
                self.prefer = Some(PreferWish::Path {
                    path,
                    weight,
                    delta: (delta * 1000.0).round() as u32,
                });
            }
            PathChange::Unprefer => self.prefer = Some(PreferWish::Nothing),
            PathChange::Scheduler { name } => {
                crate::host::preferences::scheduler(&name)
                    .map_err(|message| Failure::new(ErrorKind::NotFound, message))?;
                self.scheduler = Some(name);
            }
            PathChange::Role { path, role } => {
                if role.parse::<Role>().is_err() {
                    let all = Role::ALL.map(Role::name).join(", ");
                    let message = format!("there is no role \"{role}\": there are {all}");
                    return Err(Failure::new(ErrorKind::NotFound, message));
                }
                self.path(config, &path)?.role = Some(role);
            }
            PathChange::Limit { path, rate, volume } => {
                for (what, wrong) in [
                    ("rate", rate.and_then(|rate| limit(rate, Rate::new).err())),
                    (
                        "volume",
                        volume.and_then(|volume| limit(volume, Volume::new).err()),
                    ),
                ] {
                    if let Some(wrong) = wrong {
                        return Err(bad(format!("{what}: {wrong}")));
                    }
                }
                let wish = self.path(config, &path)?;
                wish.rate = rate.or(wish.rate);
                wish.volume = volume.or(wish.volume);
            }
            PathChange::Reset => *self = Self::default(),
        }
        Ok(())
    }

    /// What is wanted of a path of the file.
    fn path(&mut self, config: &Config, name: &str) -> Result<&mut PathWish, Failure> {
        if !config.paths.iter().any(|path| path.name == name) {
            let known = config.paths.iter().map(|path| &*path.name);
            return Err(Failure::unknown("path", name, known));
        }
        Ok(self.paths.entry(name.to_owned()).or_default())
    }
}

/// The scheduler of that name.
///
/// # Errors
/// There is none, in one clause that names those that are.
pub fn scheduler(name: &str) -> Result<Scheduler, String> {
    name.parse().map_err(|_| {
        let all = Scheduler::ALL.map(Scheduler::name).join(", ");
        format!("there is no scheduler \"{name}\": there are {all}")
    })
}

fn from_thousandths(delta: u32) -> f64 {
    f64::from(delta) / 1000.0
}

fn limit<T, E>(limit: Limit, new: impl Fn(u64) -> Result<T, E>) -> Result<Option<T>, E> {
    match limit {
        Limit::None => Ok(None),
        Limit::At(amount) => new(amount).map(Some),
    }
}

impl InForce {
    /// Why things cannot be so.
    fn fault(&self) -> Option<String> {
        if self.paths.iter().all(|path| path.role == Role::Never) {
            let why = "every path would be off, and no connection could be protected";
            return Some(format!("{why}: give another path another role first"));
        }
        None
    }
}

/// How paths are used now.
#[derive(Debug)]
pub(crate) struct Preferences {
    wishes: Wishes,
    now: InForce,
    volumes: Volumes,
}

impl Preferences {
    /// What the file and an earlier daemon left.
    pub(crate) fn new(config: &Config, wishes: &Wishes) -> Self {
        let (wishes, whys) = wishes.clone().fitting(config);
        for why in whys {
            tracing::warn!("a setting of dibsctl path is dropped: {why}");
        }
        let directory = &config.daemon.state_dir;
        let mut preferences = Self {
            now: wishes.in_force(config),
            wishes,
            volumes: Volumes::load(directory, config.paths.len(), Month::now()),
        };
        let of_file = config.warnings();
        for warning in preferences.warnings(config) {
            if !of_file.contains(&warning) {
                tracing::warn!("{warning}");
            }
        }
        for turn in preferences.count(config, &[], Month::now()) {
            if turn.now == Stage::Spent {
                let name = &config.paths[turn.path].name;
                tracing::warn!("path {name} has used up its data cap for this month");
            }
        }
        preferences
    }

    /// What outlives the daemon.
    pub(crate) fn wishes(&self) -> &Wishes {
        &self.wishes
    }

    /// What a path, by index, is for.
    pub(crate) fn usage(&self, path: usize) -> PathUsage {
        self.now.paths[path]
    }

    /// Whether the volume of any path is limited.
    pub(crate) fn limits_volumes(&self) -> bool {
        self.now.paths.iter().any(|path| path.volume.is_some())
    }

    /// Reason that a path may carry no data, if there is one.
    pub(crate) fn forbids(&self, path: usize) -> Option<Unused> {
        let Usage { role, spent, .. } = self.node_usage(path);
        match (role, spent) {
            (Role::Never, _) => Some(Unused::Never),
            (_, true) => Some(Unused::Spent),
            _ => None,
        }
    }

    /// Tells how a path is used.
    pub(crate) fn describe(&self, config: &Config, path: usize, info: &mut PathInfo) {
        let name = &config.paths[path].name;
        let PathUsage { role, rate, volume } = self.now.paths[path];
        let prefer = self.now.prefer.as_ref();
        info.preferred = prefer.is_some_and(|prefer| prefer.path == *name);
        info.role = role.to_string();
        info.rate_limit = rate.map(Rate::bits);
        info.volume = volume.map(Volume::bytes);
        info.volume_used = volume.map(|_| self.volumes.used(name));
        info.scheduler = self.now.scheduler.to_string();
    }

    /// What the user should hear of the configuration as it is used.
    pub(crate) fn warnings(&self, config: &Config) -> Vec<String> {
        config.warnings_with(|path| self.now.paths[path].role)
    }

    /// Adds what the data path has counted by now, by path; which have used another part of their volume.
    pub(crate) fn count(&mut self, config: &Config, totals: &[u64], month: Month) -> Vec<Turn> {
        let names = config.paths.iter().map(|path| path.name.as_str());
        let limits = names.zip(self.now.paths.iter().map(|path| path.volume));
        self.volumes.count(limits.clone(), totals, month);
        self.volumes.judge(limits)
    }

    /// Adds what sessions have carried by now; which paths have used another part of their volume by that.
    pub(crate) fn count_carried(&mut self, config: &Config, snapshot: &Snapshot) -> Vec<Turn> {
        self.count(config, &snapshot.carried, Month::now())
    }

    /// What paths carried, to be kept.
    pub(crate) fn volumes(&mut self) -> &mut Volumes {
        &mut self.volumes
    }

    /// What the data path is told of a path.
    fn node_usage(&self, path: usize) -> Usage {
        let PathUsage { role, rate, .. } = self.now.paths[path];
        Usage {
            role,
            rate: rate.map(Rate::bytes),
            spent: self.volumes.stage(path) == Stage::Spent,
        }
    }

    fn hint(&self, config: &Config) -> Option<Hint> {
        let prefer = self.now.prefer.as_ref()?;
        let path = config
            .paths
            .iter()
            .position(|path| path.name == prefer.path)?;
        Some(Hint {
            path,
            weight: prefer.weight,
            delta: prefer.delta,
        })
    }

    /// Has a node begin with what holds.
    pub(crate) fn put_into(&self, node: &mut NodeConfig, config: &Config) {
        for (index, path) in node.paths.iter_mut().enumerate() {
            path.usage = self.node_usage(index);
        }
        node.scheduler = self.now.scheduler;
        node.hint = self.hint(config);
    }

    /// Tells the data path all that holds: what is as before changes nothing there.
    fn tell_data_path(&self, config: &Config, driver: &Driver) -> Result<(), Gone> {
        for path in 0..config.paths.len() {
            self.tell_usage(driver, path)?;
        }
        driver.set_scheduler(self.now.scheduler)?;
        driver.prefer(self.hint(config))
    }

    /// Tells the data path what a path is for.
    pub(crate) fn tell_usage(&self, driver: &Driver, path: usize) -> Result<(), Gone> {
        driver.set_usage(path, self.node_usage(path))
    }

    /// What would hold after a change.
    ///
    /// # Errors
    /// There can be no such thing.
    pub(crate) fn changed(&self, config: &Config, change: &PathChange) -> Result<Wishes, Failure> {
        let mut wishes = self.wishes.clone();
        wishes.take(config, change.clone())?;
        let now = wishes.in_force(config);
        let never = |path: &str| {
            let mut paths = config.paths.iter().zip(&now.paths);
            paths.any(|(known, usage)| known.name == path && usage.role == Role::Never)
        };
        let contradiction = match change {
            PathChange::Prefer { path, .. } if never(path) => Some(format!(
                "path \"{path}\" is off: give it another role first"
            )),
            _ => None,
        };
        match contradiction.or_else(|| now.fault()) {
            Some(why) => Err(Failure::new(ErrorKind::Refused, why)),
            None => Ok(wishes),
        }
    }

    /// Has other wishes saved from now on, and returns those that were; what holds follows with
    /// [`apply`](Self::apply).
    pub(crate) fn replace_wishes(&mut self, wishes: Wishes) -> Wishes {
        std::mem::replace(&mut self.wishes, wishes)
    }

    /// Has the wishes hold, and the data path told; which paths have used another part of their volume by that.
    pub(crate) fn apply(&mut self, config: &Config, driver: &Driver) -> Result<Vec<Turn>, Gone> {
        self.now = self.wishes.in_force(config);
        let turns = self.count(config, &[], Month::now());
        self.tell_data_path(config, driver)?;
        Ok(turns)
    }

    /// For users.
    pub(crate) fn info(&self, config: &Config) -> dibs_control::Preferences {
        let paths = config.paths.iter().zip(&self.now.paths);
        let of_path =
            |(path, usage): (&dibs_config::PathConfig, &PathUsage)| dibs_control::PathUsage {
                name: path.name.clone(),
                role: usage.role.to_string(),
                rate_limit: usage.rate.map(Rate::bits),
                volume: usage.volume.map(Volume::bytes),
            };
        dibs_control::Preferences {
            scheduler: self.now.scheduler.to_string(),
            prefer: self.now.prefer.as_ref().map(|prefer| Preferred {
                path: prefer.path.clone(),
                weight: prefer.weight,
                delta: prefer.delta,
            }),
            paths: paths.map(of_path).collect(),
            changed: self.wishes != Wishes::default(),
            warnings: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests;
