//! What `init` says when it is done.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use anyhow::Result;
use dibs_config::PublicKey;
use dibs_config::setup::{Claims, Introduction};
use ipnet::IpNet;
use serde_json::json;

use super::interfaces::Interface;
use crate::output::{show, warn};
use crate::table::{Table, table};

/// What was done, and what the other host needs.
pub(crate) struct Report {
    pub(crate) file: PathBuf,
    /// Whether the configuration was written.
    pub(crate) changed: bool,
    /// Whether it was written from the beginning.
    pub(crate) new: bool,
    /// Where the former one is.
    pub(crate) old: Option<PathBuf>,
    pub(crate) key_file: PathBuf,
    /// Whether the key was made now.
    pub(crate) key_made: bool,
    /// This host.
    pub(crate) line: Introduction,
    /// Interfaces that are trusted because the other host's line says so.
    pub(crate) by_line: Vec<ByLine>,
    /// The other one.
    pub(crate) peer: Option<Peer>,
    /// True if the other one learns of this host by itself.
    pub(crate) joins: bool,
    /// Networks that this host forwards for since.
    pub(crate) gateway: Vec<IpNet>,
    /// Sysctls that are to be set first.
    pub(crate) unforwarded: Vec<&'static str>,
}

/// An interface that is trusted because it is in a network with an interface that the other host's line calls trusted.
pub(crate) struct ByLine {
    pub(crate) interface: String,
    /// Name of the other host's interface, as the line says.
    pub(crate) way: String,
    /// Address of that one, as the line says.
    pub(crate) address: IpAddr,
}

/// The other host, as the configuration has it.
pub(crate) struct Peer {
    pub(crate) name: String,
    pub(crate) public_key: PublicKey,
    /// True if this host reaches the Internet by it.
    pub(crate) exit: bool,
    /// Addresses that its line names.
    pub(crate) claims: Claims,
    /// Addresses that it appears as, if it has none of its own here.
    pub(crate) lent: Vec<IpAddr>,
    /// By path.
    pub(crate) endpoints: Vec<(String, SocketAddr)>,
    pub(crate) warnings: Vec<String>,
}

impl Report {
    /// Prints it.
    pub(crate) fn show(&self, json: bool) -> Result<()> {
        show(json, &self.json(), || self.text())?;
        let peer = self.peer.iter().filter(|_| !json);
        peer.for_each(|peer| warn(&peer.warnings));
        Ok(())
    }

    fn json(&self) -> serde_json::Value {
        let paths = self.line.ways.iter();
        let paths = paths.map(|way| {
            json!({ "name": way.name, "trust": way.trust.as_str(), "addresses": way.addresses })
        });
        let peer = self.peer.as_ref().map(|peer| {
            let endpoints = peer.endpoints.iter();
            let endpoints = endpoints.map(|(path, to)| json!({ "path": path, "endpoint": to }));
            let taken = peer.claims.taken.iter();
            let taken = taken.map(
                |taken| json!({ "address": taken.address, "because": taken.ground.to_string() }),
            );
            let left = peer.claims.left.iter();
            let left = left.map(|left| {
                json!({
                    "address": left.address, "path": left.way, "because": left.refusal.to_string(),
                })
            });
            json!({
                "name": peer.name,
                "public_key": peer.public_key.to_string(),
                "exit": peer.exit,
                "addresses": taken.collect::<Vec<_>>(),
                "left_out": left.collect::<Vec<_>>(),
                "appears_as": peer.lent,
                "endpoints": endpoints.collect::<Vec<_>>(),
            })
        });
        let by_line = self.by_line.iter().map(|by| {
            json!({ "interface": by.interface, "peer_path": by.way, "peer_address": by.address })
        });
        let warnings = self.peer.as_ref().map_or(&[][..], |peer| &peer.warnings);
        json!({
            "config": self.file,
            "changed": self.changed,
            "old": self.old,
            "private_key_file": self.key_file,
            "private_key_made": self.key_made,
            "public_key": self.line.public_key.to_string(),
            "paths": paths.collect::<Vec<_>>(),
            "trusted_by_line": by_line.collect::<Vec<_>>(),
            "peer": peer,
            "line": self.line.to_string(),
            "gateway": self.gateway,
            "not_forwarding": self.unforwarded,
            "warnings": warnings,
        })
    }

    fn text(&self) -> String {
        let (file, key_file) = (self.file.display(), self.key_file.display());
        let key = if self.key_made { "is new" } else { "is kept" };
        let written = match (self.new, self.changed) {
            (true, _) => "is new",
            (_, true) => "has one more peer",
            _ => "is unchanged",
        };
        let mut text = format!("{key_file} {key}\n{file} {written}\n");
        if let Some(old) = &self.old {
            text += &format!("{} is the old configuration\n", old.display());
        }
        let paths = table!(self.line.ways, way:
            "PATH", way.name.clone();
            "TRUST", way.trust.as_str().to_owned();
            "ADDRESSES", list(&way.addresses);
        );
        text += &format!("\n{paths}");
        if let Some(peer) = &self.peer {
            text += &peer.text(&self.by_line);
        }
        if !self.gateway.is_empty() {
            text += &format!(
                "\nThis host forwards for {}. Left to you: DHCP and DNS for these devices, and masquerading for UDP (docs/exit.md)\n",
                list(&self.gateway)
            );
        }
        if !self.unforwarded.is_empty() {
            let set: String = { self.unforwarded.iter() }
                .map(|key| format!(" {key}=1"))
                .collect();
            text += &format!(
                "\nHere, because this host does not forward yet, run, and keep it in /etc/sysctl.d:\n    sudo sysctl -w{set}\n"
            );
        }
        let when = match &self.peer {
            Some(peer) => format!("On {}, unless it knows this host already, run", peer.name),
            None => "On the other host, run".to_owned(),
        };
        let once = self.line.token.is_some();
        if once {
            let line = &self.line;
            text += &format!(
                "\nOn the host that is to join, once and within an hour (secret until then), run:\n    sudo dibsctl init \
                 --join {line}\n"
            );
        } else if !self.joins {
            text += &format!("\n{when}:\n    sudo dibsctl init --peer {}\n", self.line);
        }
        match (&self.peer, self.changed || self.joins) {
            (None, _) if !once => text += "\nThen run here the command that it prints.\n",
            (Some(_), false) => {}
            (None, _) if !self.new => {}
            _ => {
                text += "\nHere, run (open connections are kept):\n    sudo systemctl enable dibs-guard dibsd\n    \
                         sudo systemctl restart dibsd\n";
            }
        }
        text
    }
}

impl Peer {
    /// All that the other host's line decides, to be looked through.
    fn text(&self, by_line: &[ByLine]) -> String {
        let by = |(path, to): &(String, SocketAddr)| format!("{to} over {path}");
        let by: Vec<_> = self.endpoints.iter().map(by).collect();
        let by = match &by[..] {
            [] => "it contacts this host".to_owned(),
            by => format!("contacted at {}", by.join(", ")),
        };
        let name = &self.name;
        let mut text = format!(
            "\npeer {name}: {by}\nCheck what its join token decides:\n  public key {}\n",
            self.public_key
        );
        for taken in &self.claims.taken {
            text += &format!(
                "  connections to {} can be protected ({})\n",
                taken.address, taken.ground
            );
        }
        if self.exit {
            text += "  every new TCP connection to the Internet goes by it, because the join token says that it is an exit\n";
        }
        if !self.lent.is_empty() {
            text += &format!("  its connections come from {} here\n", list(&self.lent));
        }
        for left in &self.claims.left {
            let (address, way, refusal) = (left.address, &left.way, left.refusal);
            text += &format!("  left out: {address} of {way} ({refusal})\n");
        }
        for by in by_line {
            let (interface, way, address) = (&by.interface, &by.way, by.address);
            text += &format!(
                "  {interface} is TRUSTED because the token says that {way} of {name} is, which has {address} in its \
                 network. If somebody may eavesdrop there, repeat this with --force --trusted INTERFACE\n"
            );
        }
        text
    }
}

/// What paths can be made of.
pub(crate) fn offer(all: &[Interface]) -> Table {
    let unless_named = |interface: &Interface| match interface.is_way_out(all) {
        true => "untrusted path",
        false => "no path",
    };
    table!(all, interface:
        "INTERFACE", interface.name.clone();
        "ADDRESSES", list(&interface.addresses());
        "DEFAULT", unless_named(interface).to_owned();
    )
}

fn list<T: ToString>(addresses: &[T]) -> String {
    let addresses: Vec<_> = addresses.iter().map(T::to_string).collect();
    addresses.join(", ")
}
