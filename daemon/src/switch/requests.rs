//! What users ask for over the control socket.

use anyhow::bail;
use dibs_control::{ErrorKind, Failure, Reply, Request};
use dibs_switch::engine::{self, Goal};
use tokio::sync::broadcast;

use crate::control::events::Told;
use crate::control::socket::Serves;
use crate::control::{Caller, Progress, TurnedAway, failure, refused};
use crate::host::live::Live;
use crate::rulebook::rules::Rule;
use crate::switch::{Daemon, knocking, listing, marking, reconcile, sessions, switching};

mod moving;
mod named;
mod paths;
mod rules;

impl Serves for Daemon {
    async fn serve(
        &self,
        caller: Caller,
        request: Request,
        progress: &Progress,
    ) -> Result<Reply, Failure> {
        let served = serve(self, caller, request, progress).await;
        served.map_err(failure)
    }

    fn follow(&self) -> broadcast::Receiver<Told> {
        self.events.follow()
    }

    fn turned_away(&self) -> &TurnedAway {
        self.users.turned_away()
    }
}

/// Does what a user asks for; [`Request::Events`] is the socket's business.
async fn serve(
    daemon: &Daemon,
    caller: Caller,
    request: Request,
    progress: &Progress,
) -> anyhow::Result<Reply> {
    let changes = match &request {
        Request::Enable { .. }
        | Request::Disable { .. }
        | Request::RuleAdd(_)
        | Request::RuleDel { .. } => true,
        Request::Cleanup | Request::ForceCleanup if !caller.is_root() => {
            bail!(Failure::new(ErrorKind::Denied, "only root may clean up"));
        }
        Request::PathChange(_) if !caller.is_root() => {
            let why = "only root may change how paths are used, for that concerns everybody";
            bail!(Failure::new(ErrorKind::Denied, why));
        }
        Request::Cleanup | Request::ForceCleanup | Request::PathChange(_) => true,
        _ => false,
    };
    let _turn = daemon.users.admit(caller, changes).await?;
    Ok(match request {
        Request::Status => Reply::Status(listing::status(daemon, caller).await?),
        Request::ConnList => {
            let conns = named::visible(daemon, caller).await?;
            Reply::Conns(conns.into_iter().map(|(_, info)| info).collect())
        }
        Request::Enable { selector, bump } => {
            let bump = Some(named::bump_for(daemon, bump.as_deref())?.id);
            let changed = moving::change(daemon, caller, &selector, bump.into(), progress);
            Reply::Changed(changed.await?)
        }
        Request::Disable { selector, force } => {
            let goal = Goal { bump: None, force };
            Reply::Changed(moving::change(daemon, caller, &selector, goal, progress).await?)
        }
        Request::RuleAdd(rule) => Reply::Rule(rules::rule_add(daemon, caller, rule).await?),
        Request::RuleList => {
            let state = daemon.state.borrow();
            let seen = state
                .rules
                .listed()
                .filter(|rule| caller.may(rule.only_user()));
            Reply::Rules(seen.map(Rule::info).collect())
        }
        Request::RuleDel { id, force } => {
            Reply::RuleGone(rules::rule_del(daemon, caller, id, force).await?)
        }
        Request::PathList => Reply::Paths(listing::path_list(daemon).await?),
        Request::PathPreferences => {
            Reply::Preferences(daemon.preferences.borrow().info(&daemon.config))
        }
        Request::PathChange(change) => Reply::Preferences(paths::change(daemon, change).await?),
        Request::PeerList => Reply::Peers(listing::peer_list(daemon).await?),
        Request::BumpList => Reply::Bumps(listing::bump_list(daemon).await?),
        Request::Events => Reply::Following,
        Request::Cleanup | Request::ForceCleanup => {
            cleanup(daemon, request == Request::ForceCleanup).await?;
            Reply::Done
        }
    })
}

/// Takes all connections to plain, and everything out of the kernel; what plain does not carry breaks by that, which
/// takes `force`.
async fn cleanup(daemon: &Daemon, force: bool) -> anyhow::Result<()> {
    let lives = daemon.connections().await?;
    let on_bumps: Vec<Live> = lives
        .into_iter()
        .filter(|live| !live.over && daemon.bump_of(live).is_some())
        .collect();
    let up = sessions::sessions(daemon).await?;
    // Peers whose rules want otherwise keep their part, and answer into nothing.
    let told: Vec<Live> = on_bumps.into_iter().filter(|live| up[live.peer]).collect();
    if !force {
        let stuck = knocking::refusals(daemon, &told).await?;
        if let Some((pair, why)) = stuck.iter().next() {
            bail!(refused(format!(
                "{} connection(s) would break, so nothing was changed: of the one from {pair}, {why}; \"cleanup \
                 --force\" removes everything all the same",
                stuck.len(),
            )));
        }
    }
    marking::overrule(daemon, &told).await?;
    let progress = Progress::default();
    let goal = Goal {
        bump: None,
        force: true,
    };
    switching::choose(daemon, &told, goal, &progress).await?;
    {
        let mut state = daemon.state.borrow_mut();
        state.rules.suspend();
        state.conns.clear();
        for peer in &mut state.peers {
            peer.wants.clear();
        }
    }
    daemon.save()?;
    engine::wants::send_all(daemon).await;
    reconcile::tell_flow_schedulers(daemon)?;
    reconcile::remove_all(daemon, false).await?;
    daemon.events.tell(
        "cleanup",
        "everything was removed from the kernel; rules of the file wait for SIGHUP or a restart"
            .to_owned(),
        &[],
    );
    Ok(())
}
