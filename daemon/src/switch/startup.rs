//! Start of the daemon, from the configuration file to a node and what steering starts with; and `dibsd --guard`: what has to
//! be on a bump is blocked before there is a network and before the daemon runs. The daemon then finds everything as it would
//! have made it, and adds its TUNs.
//!
//! Rules that cannot be resolved are blocked more coarsely: all TCP of a rule's ports and addresses where its user is not
//! known or iptables does not take it, and what was carried out last where the file cannot be read.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;

use anyhow::Context as _;
use dibs_config::Config;
use dibs_config::joining::{Store, Token};
use dibs_config::setup::{self, Addresses};
use dibs_core::bump::Pads;
use dibs_core::node::{LocalPath, NodeConfig, PeerConfig, Ticket};
use dibs_core::preference::Usage;
use dibs_core::session::{PublicKey, Secret, StaticSecret, Suite};
use dibs_policy::{
    Backstop, Binding, ClassRule, Desired, Fail, Family, Known, Probed, Standing, Steering,
    Strength,
};
use dibs_settings::{BumpId, Scheduler};
use ipnet::IpNet;

use crate::data::bumps;
use crate::data::thread::MAX_PATHS;
use crate::host::interfaces::{Interfaces, Inventory};
use crate::host::{endpoints, process};
use crate::rulebook::kept::Kept;
use crate::rulebook::rules;
use crate::rulebook::state_file::{Saved, StateFile};
use crate::switch::{Daemon, Task, initial_state};

/// Reads the file, and refuses what this version does not carry.
pub fn load(file: &Path) -> Result<Config, dibs_config::Error> {
    let config = dibs_config::joining::load(file)?;
    check(&config)?;
    Ok(config)
}

/// Ticket with which a peer, by index, is called until it has taken this host.
pub(crate) fn own_ticket(config: &Config, peer: usize) -> Option<Ticket> {
    let (server, ticket) = store(config).kept()?;
    let is_for = config.peers[peer].public_key == server;
    is_for.then(|| Ticket::new(ticket))?
}

/// Forgets that ticket, because the peer knows this host.
pub(crate) fn forget_ticket(daemon: &Daemon, peer: usize) {
    if own_ticket(&daemon.config, peer).is_some() {
        let forgotten = store(&daemon.config).forget();
        process::or_warn(forgotten.context("cannot delete the join token"));
    }
}

/// Join tokens, and the peers that joined by one.
pub(crate) fn store(config: &Config) -> Store {
    Store::new(config.daemon.state_dir.clone())
}

/// Takes a host that calls with a ticket as a peer, if nobody has used its token. The daemon starts again then.
pub(crate) fn admit(daemon: &Daemon, file: &Path, key: [u8; 32], ticket: &[u8]) {
    let networks = Token::of_ticket(ticket).and_then(|(token, name)| {
        let networks = store(&daemon.config).networks(&token, process::since_1970())?;
        Some((token, name, networks))
    });
    let Some((token, name, networks)) = networks else {
        daemon.state.borrow_mut().refused.tokens += 1;
        return;
    };
    let joined = join(file, key, (&token, name), &networks);
    let failed = "a host that has a valid join token cannot join";
    if let Some(name) = process::or_warn(joined.context(failed)) {
        let text = format!("peer {name} joined: dibsd starts again");
        daemon.events.tell("peer_joined", text, &[("peer", name)]);
        daemon.wakers.wake(Task::Restart);
    }
}

/// Adds a peer that joins; its name here.
fn join(
    file: &Path,
    key: [u8; 32],
    (token, name): (&Token, &str),
    networks: &[IpNet],
) -> anyhow::Result<String> {
    // Others may have joined since the start, and the file may not be right any more.
    let config = load(file)?;
    let peers = &config.peers;
    let public_key = dibs_config::PublicKey::try_from(key)?;
    let own = dibs_config::read_private_key(&config.daemon.private_key_file)?;
    anyhow::ensure!(public_key != own.public(), "it has the key of this host");
    if let Some(known) = peers.iter().find(|peer| peer.public_key == public_key) {
        return Ok(known.name.clone());
    }
    let name = setup::free_name(name, |name| peers.iter().any(|peer| peer.name == name));
    let theirs = peers.iter().flat_map(|peer| &peer.addresses);
    let taken = networks.iter().chain(theirs);
    let taken: Vec<&IpNet> = taken.filter(|net| net.prefix_len() > 0).collect();
    let lent = setup::lent(|address| taken.iter().any(|net| net.contains(&address)));
    let section = setup::peer_section(&name, (public_key, false), &[], &Addresses::Lent(lent));
    let store = store(&config);
    store.accept(token, &name, &section)?;
    match load(file) {
        Ok(_) => Ok(name),
        Err(error) => {
            store.remove(&name)?;
            Err(error.into())
        }
    }
}

/// Refuses what this version does not carry, at its place in the file.
pub fn check(config: &Config) -> Result<(), dibs_config::Error> {
    config.check_carried()?;
    let refuse = |key: &str, what: &str, hint: Option<&str>| {
        let message = format!("this version of dibsd does not support {what}");
        Err(config.refuse(key, message, hint.map(str::to_owned)))
    };
    if config.paths.len() > MAX_PATHS {
        let key = format!("path.{MAX_PATHS}.name");
        return refuse(&key, &format!("more than {MAX_PATHS} paths"), None);
    }
    for (index, rule) in config.rules.iter().enumerate() {
        if rules::classes_of(rule) > rules::MAX_CLASSES {
            let wide = match rule.selection.dport() {
                Some(_) => "dport",
                None => "sport",
            };
            return refuse(
                &format!("rule.{index}.{wide}"),
                &format!(
                    "rules of more than {} combinations of ports and addresses",
                    rules::MAX_CLASSES
                ),
                Some("write ports that follow each other as a range, which counts as one"),
            );
        }
    }
    Ok(())
}

/// Configuration of the node; reads the key files.
pub fn node_config(config: &Config, inventory: &Inventory) -> anyhow::Result<NodeConfig> {
    let key = dibs_config::read_private_key(&config.daemon.private_key_file)?;
    let mut peers = Vec::with_capacity(config.peers.len());
    for (index, peer) in config.peers.iter().enumerate() {
        let preshared = match &peer.preshared_key_file {
            Some(file) => {
                let key = dibs_config::read_preshared_key(file)
                    .with_context(|| format!("peer {}", peer.name))?;
                Some(Box::new(Secret::new(*key.as_bytes())))
            }
            None => None,
        };
        peers.push(PeerConfig {
            public: PublicKey::from(*peer.public_key.as_bytes()),
            preshared,
            accept: peer.accept.clone(),
            prefixes: peer.addresses.clone(),
            // Names are looked up later, and keep nobody waiting.
            endpoints: endpoints::addresses(config, index),
            appears_as: peer.appears_as.clone(),
        });
    }
    let local = |path: &dibs_config::PathConfig| LocalPath {
        trusted: path.trust == dibs_config::Trust::Trusted,
        mtu: inventory.path_state(path).1,
        // Until its socket is open.
        up: false,
        usage: Usage::default(),
        addresses: inventory.path_addresses(path),
        public: path.public.clone(),
    };
    Ok(NodeConfig {
        private: Box::new(StaticSecret::from(*key.as_bytes())),
        suite: Suite::for_this_cpu(),
        integrity: config.daemon.integrity,
        handshake: config.daemon.handshake,
        paths: config.paths.iter().map(local).collect(),
        peers,
        addresses: inventory.host_addresses(BumpId::is_tun),
        reachable: inventory.reachable(&config.paths),
        gateway: config.daemon.gateway.clone(),
        exit: config.daemon.exits().to_vec(),
        trusted_share: config.daemon.trusted_share,
        bumps: bumps::for_node(config),
        pads: Pads::seeded_by(getrandom::fill).context("the system's random generator failed")?,
        hold_without_trusted: config.daemon.on_trusted_down == dibs_config::OnTrustedDown::Hold,
        scheduler: Scheduler::default(),
        hint: None,
    })
}

/// Puts into the kernel what blocks, and ends.
///
/// # Errors
/// It could not; the message is one clear sentence.
pub fn run_guard(file: &Path) -> anyhow::Result<()> {
    process::ensure_descriptors()?;
    process::restrict([])?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(guard(file))
}

async fn guard(file: &Path) -> anyhow::Result<()> {
    let wanted = match load(file) {
        Ok(config) => of_file(&config, &interfaces().await)?,
        Err(error) => of_last_run(file, error)?,
    };
    let Some(Wanted {
        mut wish,
        known,
        alone: _alone,
    }) = wanted
    else {
        tracing::info!("nothing to do, because dibsd runs and blocks by itself");
        return Ok(());
    };
    if wish.fail == Fail::Open {
        tracing::info!("nothing is blocked, because fail is \"open\"");
        return Ok(());
    }
    if wish.bumps.is_empty() {
        tracing::info!(
            "nothing is blocked, because no rule and no user put a connection on a bump"
        );
        return Ok(());
    }
    let mut steering = Steering::system(None)?;
    settle(&mut steering, &mut wish).await;
    let steered = steering.set(&wish).await.context("cannot steer");
    let mut backstop = Backstop::open()?;
    let backed = backstop.set(&wish, &known).await;
    match (&backed, backstop.standing()) {
        (Ok(_), Standing::Stands(Strength::Lasting)) => {}
        (Ok(_), _) => {
            tracing::info!("the kill switch in nftables ends with this process (Linux before 6.9)")
        }
        (Err(error), _) => {
            tracing::error!(
                "{error}: if another program flushes the firewall, unprotected packets can leave"
            );
        }
    }
    match (steered, backstop.standing()) {
        (Ok(_), _) => {
            steering.clear_others().await?;
        }
        (Err(error), Standing::Stands(Strength::Lasting)) => {
            tracing::error!(
                "{error:#}: only the kill switch in nftables blocks, and rules with a match are not in force"
            );
        }
        (Err(error), _) => return Err(error),
    }
    tracing::info!("blocked until the daemon runs");
    Ok(())
}

/// Interfaces as they are now. If the kernel does not list them, rules name them as the file does.
async fn interfaces() -> Inventory {
    let listed = async { Interfaces::open()?.list().await };
    listed.await.unwrap_or_else(|error| {
        tracing::error!("{error:#}: alternative names of interfaces are not known");
        Inventory::default()
    })
}

/// Wishes to carry out.
struct Wanted {
    wish: Desired,
    known: Known,
    /// A daemon that starts meanwhile waits for it.
    alone: StateFile,
}

/// Wishes of the file's rules, and of the choices and rules of users that are saved; nothing if a daemon runs.
fn of_file(config: &Config, inventory: &Inventory) -> anyhow::Result<Option<Wanted>> {
    let Some(alone) = StateFile::open_unserved(&config.daemon.control_socket)? else {
        return Ok(None);
    };
    let saved = alone.load().unwrap_or_else(|error| {
        tracing::error!("{error:#}: connections that users protected are not blocked");
        Saved::default()
    });
    // Addresses go on TUNs, which come with the daemon.
    let mut state = initial_state(config, &saved)?;
    state.rules.block();
    for rule in state.rules.all() {
        if let Some(unresolved) = &rule.unresolved {
            tracing::error!(
                "rule {} {}: {}",
                rule.id,
                done_instead(unresolved.waits),
                unresolved.why
            );
        }
    }
    Ok(Some(Wanted {
        wish: state.wish(config, inventory, &[], None),
        known: state.known(),
        alone,
    }))
}

/// Wishes that were carried out last, as the file cannot be read.
fn of_last_run(file: &Path, error: dibs_config::Error) -> anyhow::Result<Option<Wanted>> {
    let directory = dibs_config::state_dir(file);
    let kept = Kept::read(&directory)?;
    let Some(Kept {
        control_socket,
        wish,
        ..
    }) = kept
    else {
        let none = format!(
            "nothing is blocked: {} has no rule that was in force before",
            directory.display()
        );
        return Err(anyhow::Error::from(error).context(none));
    };
    tracing::error!("{error}: the rules that were in force last are blocked");
    let alone = StateFile::open_unserved(&control_socket)?;
    Ok(alone.map(|alone| Wanted {
        wish,
        known: Known::default(),
        alone,
    }))
}

fn done_instead(is_left_out: bool) -> &'static str {
    match is_left_out {
        true => "is left out",
        false => "blocks all TCP of its ports and addresses",
    }
}

/// Tries each rule out that names more than ports and addresses, and puts what blocks more in the place of those that
/// iptables does not take.
async fn settle(steering: &mut Steering, wish: &mut Desired) {
    let used = |family: &Family| !wish.peers(*family).is_empty();
    let families: Vec<Family> = Family::BOTH.into_iter().filter(used).collect();
    let mut answers: BTreeMap<u32, Result<Probed, String>> = BTreeMap::new();
    let mut rules = Vec::new();
    for rule in std::mem::take(&mut wish.rules) {
        if rule == rule.coarse() {
            rules.push(rule);
            continue;
        }
        // All classes of a rule match the same, but for ports and addresses.
        let answer = match answers.entry(rule.id) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let class = ClassRule {
                    source: None,
                    destination: None,
                    ..rule.clone()
                };
                let answer = steering.probe(&class, &families).await;
                let answer = answer.map_err(|error| error.to_string());
                tell(&rule, &answer);
                place.insert(answer)
            }
        };
        rules.extend(held(&rule, answer));
    }
    wish.rules = rules;
}

/// Rules that hold one of which iptables said this: the rule, where it is taken; where it is not, all TCP of its ports and
/// addresses, if anything is blocked by it without a session. Where the daemon would make do with one IP version, so does
/// this.
fn held(rule: &ClassRule, answer: &Result<Probed, String>) -> Vec<ClassRule> {
    let within = |family, rule: ClassRule| ClassRule {
        family: Some(family),
        ..rule
    };
    let held = match answer {
        Ok(Probed { refusal: None, .. }) => vec![rule.clone()],
        Ok(Probed {
            families,
            refusal: Some((other, _)),
        }) => {
            let taken = families.iter().map(|family| within(*family, rule.clone()));
            let blocked = within(*other, rule.coarse());
            let is_required = rule.binding == Binding::Required;
            taken.chain(is_required.then_some(blocked)).collect()
        }
        Err(_) if !rule.binding.blocks() => Vec::new(),
        Err(_) => vec![rule.coarse()],
    };
    let concerned = |class: &ClassRule| Family::BOTH.iter().any(|of| class.concerns(*of));
    held.into_iter().filter(concerned).collect()
}

/// Tells what becomes of a rule of which iptables said this.
fn tell(rule: &ClassRule, answer: &Result<Probed, String>) {
    let id = rule.id;
    match answer {
        Ok(Probed { refusal: None, .. }) => {}
        Ok(Probed {
            refusal: Some((family, why)),
            ..
        }) => {
            let version = crate::rulebook::rules::name(*family);
            let instead = done_instead(rule.binding != Binding::Required);
            tracing::error!("rule {id} {instead} over {version}: iptables refuses it: {why}");
        }
        Err(why) => {
            let instead = done_instead(!rule.binding.blocks());
            tracing::error!("rule {id} {instead}: {why}");
        }
    }
}

#[cfg(test)]
mod tests {
    use dibs_settings::{BumpId, Term};

    use super::*;

    /// Rule with all that iptables can refuse.
    fn rule(binding: Binding) -> ClassRule {
        ClassRule {
            dport: Some(80.into()),
            uid: Some(7),
            terms: vec![Term::Dscp(8), Term::parse("match", "-m tos").unwrap()],
            binding,
            ..ClassRule::tcp(3, BumpId::new(3).unwrap())
        }
    }

    #[test]
    fn refused_rules_are_held_by_their_ports_and_addresses() {
        let refused = Err("no".to_owned());
        for binding in [Binding::Required, Binding::Loose] {
            let held = held(&rule(binding), &refused);
            let wide = ClassRule {
                dport: Some(80.into()),
                binding,
                ..ClassRule::tcp(3, rule(binding).bump)
            };
            assert_eq!(held, [wide]);
        }
        // Without a session it would be plain.
        assert!(held(&rule(Binding::Preferred), &refused).is_empty());
    }

    #[test]
    fn rules_that_one_ip_version_takes_are_kept_there() {
        let half = Ok(Probed {
            families: vec![Family::V4],
            refusal: Some((Family::V6, "no".to_owned())),
        });
        let required = held(&rule(Binding::Required), &half);
        let said: Vec<_> = { required.iter() }
            .map(|class| (class.family, class.uid, class.dport))
            .collect();
        let port = Some(80.into());
        let expected = [
            (Some(Family::V4), Some(7), port),
            (Some(Family::V6), None, port),
        ];
        assert_eq!(said, expected);
        assert_eq!(held(&rule(Binding::Loose), &half).len(), 1);
        let of_v4 = ClassRule {
            destination: Some("10.0.1.2/32".parse().unwrap()),
            ..rule(Binding::Required)
        };
        assert_eq!(held(&of_v4, &half).len(), 1);
        let whole = Ok(Probed {
            families: Family::BOTH.to_vec(),
            refusal: None,
        });
        assert_eq!(held(&of_v4, &whole), [of_v4]);
    }
}
