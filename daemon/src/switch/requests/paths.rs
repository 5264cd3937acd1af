//! How users have the paths used otherwise.

use dibs_config::{Rate, Volume};
use dibs_control::{PathChange, Preferences};

use crate::switch::wakers::Task;
use crate::switch::{Daemon, metering};

/// Has paths used otherwise, now and after a restart.
pub(super) async fn change(daemon: &Daemon, change: PathChange) -> anyhow::Result<Preferences> {
    // What was carried until now was carried under the limits that held.
    metering::look(daemon, false).await?;
    let config = &daemon.config;
    let (before, told) = {
        let mut preferences = daemon.preferences.borrow_mut();
        let wishes = preferences.changed(config, &change)?;
        let told = preferences.warnings(config);
        (preferences.replace_wishes(wishes), told)
    };
    if let Err(error) = daemon.save() {
        daemon.preferences.borrow_mut().replace_wishes(before);
        return Err(error);
    }
    let (turns, mut info) = {
        let mut preferences = daemon.preferences.borrow_mut();
        let turns = preferences.apply(config, &daemon.driver)?;
        let mut info = preferences.info(config);
        info.warnings = preferences.warnings(config);
        (turns, info)
    };
    info.warnings.retain(|warning| !told.contains(warning));
    let (kind, text, fields) = news(&change, &info);
    daemon.events.tell(kind, text, &fields);
    for warning in &info.warnings {
        tracing::warn!("{warning}");
    }
    for turn in &turns {
        metering::tell(daemon, turn);
    }
    daemon.wakers.wake(Task::Volumes);
    Ok(info)
}

/// What happened, for those who follow: a word, a sentence, and what it is about.
type News = (&'static str, String, Vec<(&'static str, String)>);

/// What a change came to.
fn news(change: &PathChange, now: &Preferences) -> News {
    let usage = |name: &String| now.paths.iter().find(|path| path.name == *name);
    match change {
        PathChange::Prefer { path, .. } => {
            let text = format!("new data goes by path {path} as long as it is usable");
            ("path_preference", text, vec![("path", path.clone())])
        }
        PathChange::Unprefer => (
            "path_preference",
            "no path is preferred".to_owned(),
            Vec::new(),
        ),
        PathChange::Scheduler { name } => {
            let text = format!("new data is shared out by the scheduler {name}");
            ("path_scheduler", text, vec![("scheduler", name.clone())])
        }
        PathChange::Role { path, role } => {
            let text = format!("the role of path {path} is {role}");
            let fields = vec![("path", path.clone()), ("role", role.clone())];
            ("path_role", text, fields)
        }
        PathChange::Limit { path, .. } => {
            let usage = usage(path);
            let rate = usage.and_then(|usage| Rate::new(usage.rate_limit?).ok());
            let volume = usage.and_then(|usage| Volume::new(usage.volume?).ok());
            let none = || "none".to_owned();
            let fields = vec![
                ("path", path.clone()),
                ("rate", rate.map_or_else(none, |rate| rate.to_string())),
                (
                    "volume",
                    volume.map_or_else(none, |volume| volume.to_string()),
                ),
            ];
            let (rate, volume) = (&fields[1].1, &fields[2].1);
            let text = format!("the limits of path {path} are rate {rate}, volume {volume}");
            ("path_limit", text, fields)
        }
        PathChange::Reset => {
            let text = "paths are used as the configuration file says".to_owned();
            ("path_reset", text, Vec::new())
        }
    }
}
