//! From the configuration file to a node, its sockets and what steering starts with.

use std::path::Path;

use anyhow::Context as _;
use dibs_config::Config;
use dibs_core::bump::Pads;
use dibs_core::node::{LocalPath, NodeConfig, PeerConfig};
use dibs_core::preference::Usage;
use dibs_core::session::{Integrity, PublicKey, Secret, StaticSecret, Suite};
use dibs_io::{PathSocket, SetupError};
use dibs_settings::BumpId;
use dibs_settings::Scheduler;
use nix::libc;

use crate::data::thread::MAX_PATHS;
use crate::data::{bumps, endpoints};
use crate::host::interfaces::Inventory;
use crate::kernel::steering::marks;
use crate::rulebook::rules;

/// Reads the file, and refuses what this version does not carry.
pub fn load(file: &Path) -> Result<Config, dibs_config::Error> {
    let config = dibs_config::load(file)?;
    check(&config)?;
    Ok(config)
}

/// Refuses what this version does not carry, at its place in the file.
pub fn check(config: &Config) -> Result<(), dibs_config::Error> {
    config.check_carried()?;
    let refuse = |key: &str, what: &str, hint: Option<&str>| {
        let message = format!("this version of dibsd does not carry {what} yet");
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

/// What the node is told; reads the key files.
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
        integrity: match config.daemon.integrity {
            dibs_config::Integrity::On => Integrity::On,
            dibs_config::Integrity::Off => Integrity::Off,
        },
        handshake: config.daemon.handshake,
        paths: config.paths.iter().map(local).collect(),
        peers,
        addresses: inventory.host_addresses(BumpId::is_tun),
        reachable: inventory.reachable(&config.paths),
        gateway: config.daemon.gateway.clone(),
        trusted_share: config.daemon.trusted_share,
        bumps: bumps::for_node(config),
        pads: Pads::seeded_by(getrandom::fill).context("the system's random generator failed")?,
        hold_without_trusted: config.daemon.on_trusted_down == dibs_config::OnTrustedDown::Hold,
        scheduler: Scheduler::default(),
        hint: None,
    })
}

/// Opens the socket of a path, on the interface of this name where the path is bound to one.
pub fn open_socket(
    config: &Config,
    path: &dibs_config::PathConfig,
    interface: Option<&str>,
) -> Result<PathSocket, SetupError> {
    let mark = marks(config).own();
    let port = config.daemon.port;
    let name = path.interface.as_deref();
    // The file may have a name that is too long for the kernel here.
    let name = name.map(|name| interface.unwrap_or(name));
    PathSocket::open(name, path.address, port, mark)
}

/// Whether a socket was refused for want of its interface or address, which may come.
pub fn is_awaited(error: &SetupError) -> bool {
    let absent = [libc::ENODEV, libc::EADDRNOTAVAIL];
    let code = error.error.raw_os_error();
    code.is_some_and(|code| absent.contains(&code))
}
