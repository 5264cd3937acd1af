//! What is written into the configuration file.

use std::fmt::Write as _;
use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;

use super::Meeting;
use crate::{PublicKey, Trust};

/// A path for a new file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewPath {
    /// Fit, and unlike the others'.
    pub name: String,
    /// As the kernel calls it.
    pub interface: String,
    /// This end's label.
    pub trust: Trust,
    /// Addresses that the interface has now.
    pub addresses: Vec<IpAddr>,
    /// By which others reach it, where they are translated on the way.
    pub public: Vec<IpAddr>,
}

/// A configuration with these paths and without peers, perhaps of an exit or with networks behind it; its `directory` is named where it is not the usual
/// one. Whoever writes it has it [checked](crate::parse) first.
pub fn configuration(
    paths: &[NewPath],
    directory: Option<&Path>,
    exit: bool,
    gateway: &[IpNet],
) -> String {
    let mut text = String::from(
        "# dibsd, written by `dibsctl init`. After a change, `dibsctl check FILE` checks the file, and\n\
         # `systemctl restart dibsd` applies it; open connections stay. host-a.toml has every key with its\n\
         # default (/usr/share/doc/dibs/examples).\n\
         \n\
         [daemon]\n",
    );
    for (key, name) in [("private_key_file", "private.key"), ("state_dir", "lib")] {
        if let Some(directory) = directory {
            let named = directory.join(name);
            let named = toml::Value::from(&*named.to_string_lossy());
            put(&mut text, format_args!("{key} = {named}\n"));
        }
    }
    if exit {
        text += "# Peers reach the Internet through this host, with its address (docs/exit.md).\nexit = true\n";
    }
    if !gateway.is_empty() {
        let networks = quoted(gateway);
        put(
            &mut text,
            format_args!(
                "# Networks that this host forwards for (docs/exit.md, docs/gateway.md).\ngateway = [{networks}]\n"
            ),
        );
    }
    text += "# Bump of `dibsctl enable` without --bump. seal encrypts, over every path.\n\
             default_bump = \"seal\"\n\
             # While dibsd does not run, connections on a bump are blocked (\"closed\") or continue in plain (\"open\").\n\
             #fail = \"closed\"\n\
             \n\
             # Paths out of this host. On a trusted one nobody can eavesdrop, up to the other host. The\n\
             # other host labels its end too; a path that either calls untrusted is untrusted.\n";
    for path in paths {
        let addresses: Vec<_> = path.addresses.iter().map(IpAddr::to_string).collect();
        let addresses = match &addresses[..] {
            [] => "no address when this was written".to_owned(),
            addresses => addresses.join(", "),
        };
        put(
            &mut text,
            format_args!(
                "\n[[path]]\n\
                 name = \"{}\"\n\
                 interface = \"{}\"          # {addresses}\n\
                 trust = \"{}\"\n",
                path.name,
                path.interface,
                path.trust.as_str()
            ),
        );
        if !path.public.is_empty() {
            let public = quoted(&path.public);
            put(
                &mut text,
                format_args!(
                    "# NAT translates this address to one of the interface.\npublic = [{public}]\n"
                ),
            );
        }
    }
    text + "\n# The other hosts. `dibsctl init --peer TOKEN` adds one, with the join token that `dibsctl init` printed there.\n"
}

/// Addresses of a peer in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Addresses {
    /// Networks that connections to it lead to.
    Own(Vec<IpNet>),
    /// Addresses that stand here for its own.
    Lent([IpAddr; 2]),
}

/// A peer, to stand at the end of a file: its name here, its key and whether it is an exit, where it is met, and which
/// connections are to it.
pub fn peer_section(
    name: &str,
    (public_key, exit): (PublicKey, bool),
    met: &[Meeting<'_>],
    addresses: &Addresses,
) -> String {
    let addresses = match addresses {
        Addresses::Own(addresses) => {
            let prefixes = quoted(addresses);
            format!("# Connections to these can be protected.\naddresses = [{prefixes}]")
        }
        Addresses::Lent(lent) => format!(
            "# This peer may have the same addresses as others (NAT), so its connections come from \
             these.\nappears_as = [{}]",
            quoted(lent)
        ),
    };
    let accept = match exit {
        true => "# It may open no connection here; accept = [\"22\"] would allow one port.\n",
        false => {
            "# Ports that it may open here, at the addresses of the paths above; [\"22\", \"5432\"] for fewer.\n\
             #accept = [\"paths\"]\n"
        }
    };
    let mut text = format!(
        "\n[[peer]]\n\
         name = \"{name}\"\n\
         public_key = \"{public_key}\"\n\
         {addresses}\n\
         {accept}",
    );
    let rule = match exit {
        true => {
            "\n# Every new TCP connection to the Internet goes by it. Without a session it waits.\n\
             [[rule]]\nbump = \"seal\"\nall = true\n"
        }
        false => "",
    };
    if met.is_empty() {
        return text + "# No path here leads to it, so it has to contact this host.\n";
    }
    text += "\n# Its address or name and port, by path of this host. Without a line it has to contact this \
             host.\n[peer.endpoints]\n";
    for meeting in met {
        let path = key(&meeting.path);
        put(
            &mut text,
            format_args!("{path} = \"{}\"\n", meeting.endpoint),
        );
    }
    text + rule
}

fn quoted<T: std::fmt::Display>(values: &[T]) -> String {
    let values: Vec<_> = values.iter().map(|value| format!("\"{value}\"")).collect();
    values.join(", ")
}

/// A key of TOML; a name has nothing that would end the quotes.
fn key(name: &str) -> String {
    let bare = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
    match name.chars().all(bare) {
        true => name.to_owned(),
        false => format!("\"{name}\""),
    }
}

fn put(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    text.write_fmt(arguments)
        .expect("a String takes everything");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup::{Introduction, Way};
    use crate::{PrivateKey, parse};

    #[test]
    fn what_is_written_is_read_as_it_was_meant() {
        let path = |name: &str, interface: &str, trust, addresses: &[&str]| NewPath {
            name: name.to_owned(),
            interface: interface.to_owned(),
            trust,
            addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
            public: Vec::new(),
        };
        let mut paths = [
            path("eth0.7", "eth0.7", Trust::Trusted, &["10.0.1.1", "fd00::1"]),
            path("wlan0-1", "wlan0:1", Trust::Untrusted, &[]),
        ];
        paths[1].public = vec![[203, 0, 113, 7].into()];
        let odd = Path::new("/srv/\"dibs\"\n");
        for directory in [None, Some(odd)] {
            let text = configuration(&paths, directory, false, &[]);
            let config = parse("written", &text).unwrap_or_else(|error| panic!("{error}\n{text}"));
            assert!(config.warnings().is_empty(), "{:?}", config.warnings());
            let own = directory.unwrap_or(Path::new("/etc/dibs"));
            assert_eq!(config.daemon.private_key_file, own.join("private.key"));
            let lib = directory.map_or("/var/lib/dibs".into(), |own| own.join("lib"));
            assert_eq!(config.daemon.state_dir, lib);
            for (written, read) in paths.iter().zip(&config.paths) {
                assert_eq!(written.name, read.name);
                assert_eq!(read.interface.as_ref(), Some(&written.interface));
                assert_eq!(written.trust, read.trust);
                assert_eq!(written.public, read.public);
            }
        }

        let way = Way {
            name: "eth".to_owned(),
            trust: Trust::Trusted,
            addresses: vec!["fd00::2".parse().unwrap(), "10.0.1.2".parse().unwrap()],
        };
        let other = Introduction {
            name: "b".to_owned(),
            public_key: PrivateKey::generate().public(),
            port: 5301,
            exit: true,
            token: None,
            ways: vec![way.clone()],
        };
        let met = [Meeting {
            path: "eth0.7".to_owned(),
            trust: Trust::Trusted,
            way: &way,
            endpoint: "[fd00::2]:5301".parse().unwrap(),
        }];
        let behind = ["192.168.1.0/24", "fd07::/64"].map(|net| net.parse().unwrap());
        let mut text = configuration(&paths, None, true, &behind);
        let own = ["fd00::2/128", "10.0.1.2/32", "0.0.0.0/0"];
        let own = Addresses::Own(own.map(|net| net.parse().unwrap()).into());
        text += &peer_section("b", (other.public_key, true), &met, &own);
        let third = Introduction {
            public_key: PrivateKey::generate().public(),
            ..other.clone()
        };
        let lent = crate::setup::lent(|_| false);
        text += &peer_section("c", (third.public_key, true), &[], &Addresses::Lent(lent));
        let config = parse("written", &text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let [b, c] = &config.peers[..] else {
            panic!("{:?}", config.peers)
        };
        assert_eq!(
            (b.public_key, c.public_key),
            (other.public_key, third.public_key)
        );
        assert_eq!(b.endpoints, [("eth0.7".to_owned(), met[0].endpoint.into())]);
        let prefixes: Vec<_> = b.addresses.iter().map(ToString::to_string).collect();
        assert_eq!(prefixes, ["fd00::2/128", "10.0.1.2/32", "0.0.0.0/0"]);
        // Of the one that it knows how to call.
        assert_eq!(config.rules.len(), 1);
        assert_eq!(config.daemon.gateway, behind);
        assert!(config.daemon.exit && config.rules[0].bump == "seal");
        assert!(c.endpoints.is_empty());
        assert_eq!(c.appears_as, lent);
    }
}
