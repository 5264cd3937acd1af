//! Which connections a request is about.

use std::collections::BTreeMap;
use std::fmt;

use dibs_settings::{Form, Shows, Term};
use ipnet::IpNet;
use serde::{Deserialize, Serialize, Serializer};

use crate::{ConnId, ConnInfo};

/// Some of the connections to peers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Selector {
    /// All.
    All,
    /// One live connection.
    Conn(ConnId),
    /// Those that match in everything that is named, which is not nothing.
    Match(Match),
}

/// Properties that connections have in common. Destination is the far end, source this host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Match {
    /// Remote port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dport: Option<u16>,
    /// Local port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sport: Option<u16>,
    /// Remote address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dst: Option<IpNet>,
    /// Local address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub src: Option<IpNet>,
    /// Owner of the local socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Process that holds the local socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Name of the peer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
}

/// Terms that a rule may name besides, by their keys in the configuration file; the daemon reads them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "BTreeMap<String, Text>")]
pub struct Terms(Vec<(&'static str, Text)>);

/// A term as a request has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
enum Text {
    Number(u32),
    Text(String),
}

impl Terms {
    /// Keys of these terms: those that a [`Match`] has not.
    pub fn keys() -> impl Iterator<Item = &'static str> {
        let others =
            |key: &&str| matches!(Term::kind(key), Some((_, Shows::Sending | Shows::Clock)));
        Term::keys().filter(others)
    }

    /// True if nothing is named.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// True if a term of this key is named.
    pub fn has(&self, key: &str) -> bool {
        self.0.iter().any(|(named, _)| *named == key)
    }

    /// Each key and its text.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, String)> {
        self.0.iter().map(|(key, text)| match text {
            Text::Number(number) => (*key, number.to_string()),
            Text::Text(text) => (*key, text.clone()),
        })
    }
}

/// Terms of these keys and texts; other keys are left out.
impl<'t> FromIterator<(&'t str, String)> for Terms {
    fn from_iter<I: IntoIterator<Item = (&'t str, String)>>(terms: I) -> Self {
        let named: BTreeMap<&str, String> = terms.into_iter().collect();
        let text = |key: &str, text: &String| match text.parse() {
            Ok(number) if matches!(Term::kind(key), Some((Form::Number, _))) => {
                Text::Number(number)
            }
            _ => Text::Text(text.clone()),
        };
        let named = |key| Some((key, text(key, named.get(key)?)));
        Terms(Self::keys().filter_map(named).collect())
    }
}

impl TryFrom<BTreeMap<String, Text>> for Terms {
    type Error = String;

    fn try_from(mut named: BTreeMap<String, Text>) -> Result<Self, String> {
        let terms = Self::keys().filter_map(|key| Some((key, named.remove(key)?)));
        let terms = terms.collect();
        match named.into_keys().next() {
            Some(key) => Err(format!("unknown term \"{}\"", key.escape_debug())),
            None => Ok(Terms(terms)),
        }
    }
}

impl Serialize for Terms {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.0.iter().map(|(key, text)| (key, text)))
    }
}

impl Selector {
    /// True if the connection is one of them.
    pub fn matches(&self, conn: &ConnInfo) -> bool {
        match self {
            Selector::All => true,
            Selector::Conn(id) => conn.id == *id,
            Selector::Match(wanted) => wanted.matches(conn),
        }
    }

    /// True if it names connections by what is known before they exist, as a rule has to.
    pub fn names_class(&self) -> bool {
        match self {
            Selector::All => true,
            Selector::Conn(_) => false,
            Selector::Match(wanted) => wanted.pid.is_none(),
        }
    }
}

impl Match {
    fn matches(&self, conn: &ConnInfo) -> bool {
        fn fits<T>(wanted: &Option<T>, test: impl FnOnce(&T) -> bool) -> bool {
            wanted.as_ref().is_none_or(test)
        }
        fits(&self.dport, |port| conn.remote.port() == *port)
            && fits(&self.sport, |port| conn.local.port() == *port)
            && fits(&self.dst, |net| net.contains(&conn.remote.ip()))
            && fits(&self.src, |net| net.contains(&conn.local.ip()))
            && fits(&self.uid, |uid| conn.uid == Some(*uid))
            && fits(&self.pid, |pid| conn.pid == Some(*pid))
            && fits(&self.peer, |peer| conn.peer == *peer)
    }

    /// Terms that are named, in the words of the command line.
    pub fn terms(&self) -> Vec<(&'static str, String)> {
        fn term<T: ToString>(
            name: &'static str,
            value: &Option<T>,
        ) -> Option<(&'static str, String)> {
            value.as_ref().map(|value| (name, value.to_string()))
        }
        [
            term("dport", &self.dport),
            term("sport", &self.sport),
            term("dst", &self.dst),
            term("src", &self.src),
            term("uid", &self.uid),
            term("pid", &self.pid),
            term("peer", &self.peer),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Selector::All => f.write_str("all"),
            Selector::Conn(id) => write!(f, "conn {id}"),
            Selector::Match(wanted) => {
                let terms: Vec<_> = wanted
                    .terms()
                    .iter()
                    .map(|(name, value)| format!("{name} {value}"))
                    .collect();
                f.write_str(&terms.join(" "))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conn() -> ConnInfo {
        ConnInfo {
            id: 7,
            peer: "server".to_owned(),
            local: "10.0.1.1:40000".parse().unwrap(),
            remote: "10.0.1.2:80".parse().unwrap(),
            local_there: None,
            remote_there: None,
            plain: None,
            bump: "plain".to_owned(),
            process: None,
            pid: Some(42),
            uid: None,
            mptcp: None,
            since: 0.0,
            bytes_sent: 0,
            bytes_received: 0,
            retransmissions: 0,
            paths: Vec::new(),
            reason: None,
        }
    }

    #[test]
    fn a_selector_means_all_that_it_names() {
        let matches = |wanted: Match| Selector::Match(wanted).matches(&conn());
        let base = Match {
            dport: Some(80),
            ..Match::default()
        };
        assert!(Selector::All.matches(&conn()));
        assert!(Selector::Conn(7).matches(&conn()) && !Selector::Conn(8).matches(&conn()));
        assert!(matches(base.clone()));
        assert!(matches(Match {
            sport: Some(40000),
            pid: Some(42),
            ..base.clone()
        }));
        assert!(matches(Match {
            dst: "10.0.1.0/24".parse().ok(),
            ..base.clone()
        }));
        for other in [
            Match {
                dport: Some(40000),
                ..base.clone()
            },
            Match {
                sport: Some(80),
                ..base.clone()
            },
            Match {
                dst: "10.0.1.1/32".parse().ok(),
                ..base.clone()
            },
            Match {
                src: "fd00::/8".parse().ok(),
                ..base.clone()
            },
            Match {
                uid: Some(0),
                ..base.clone()
            },
            Match {
                pid: Some(41),
                ..base.clone()
            },
            Match {
                peer: Some("other".to_owned()),
                ..base
            },
        ] {
            assert!(!matches(other.clone()), "{other:?}");
        }
    }

    #[test]
    fn prints_as_the_command_line_says_it() {
        let wanted = Match {
            dport: Some(80),
            uid: Some(1000),
            ..Match::default()
        };
        assert_eq!(Selector::Match(wanted).to_string(), "dport 80 uid 1000");
        assert_eq!(Selector::Conn(3).to_string(), "conn 3");
    }
}
