//! The line by which a host introduces itself: nothing in it is secret but a one-time token, if it has one.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use super::is_routable;
use crate::check;
use crate::joining::Token;
use crate::{PublicKey, Trust};

/// What the line begins with: the form's name and version.
const FORM: &str = "dibs1";
/// More than any host has to say.
const MOST_WAYS: usize = 32;
/// Of one interface.
const MOST_ADDRESSES: usize = 16;

/// A host as it introduces itself to another. As text it is one word that no shell takes apart:
///
/// `dibs1,name=a,key=BASE64,port=5300,trusted=eth0/10.0.1.1/fd00:1::1,untrusted=wlan0/10.0.2.1,sum=HEX`
///
/// Behind the port stands `exit=yes` if others reach the Internet by it, and `once=BASE64` if one host may join by this line
/// ([`joining`](crate::joining)). Each way out has its name and its addresses; `sum` is the CRC-32C of what stands before its comma, so that a
/// line that was not copied whole is noticed. Whitespace, as mail puts it in, counts for nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Introduction {
    /// Name that it calls itself; fit for the name of a peer.
    pub name: String,
    /// Its key.
    pub public_key: PublicKey,
    /// The UDP port of all its paths; not 0.
    pub port: u16,
    /// Others reach the Internet by it.
    pub exit: bool,
    /// Token by which one host may join.
    pub token: Option<Token>,
    /// Its paths.
    pub ways: Vec<Way>,
}

/// A path as its host knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Way {
    /// Its name there.
    pub name: String,
    /// How that host labels it.
    pub trust: Trust,
    /// Addresses at which that host is reached over it, unicast and routable; none if it has no address now.
    pub addresses: Vec<IpAddr>,
}

/// A text is no such line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadLine {
    /// It is something else.
    #[error(
        "it is no join token: paste what `dibsctl init` prints on the other host, which begins with \"{FORM},\""
    )]
    Form,
    /// Its sum is missing, or that of another line.
    #[error(
        "part of the join token is missing or changed: paste all of it, up to the sum at its end"
    )]
    Sum,
    /// A field says what cannot be.
    #[error("\"{field}\" in the join token {fault}: run `dibsctl init` again on the other host")]
    Field {
        /// As it stands there.
        field: String,
        /// What is wrong with it.
        fault: &'static str,
    },
}

impl fmt::Display for Introduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Introduction {
            name,
            public_key,
            port,
            exit,
            token,
            ways,
        } = self;
        let mut line = format!("{FORM},name={name},key={public_key},port={port}");
        if *exit {
            line += ",exit=yes";
        }
        if let Some(token) = token {
            line += &format!(",once={}", *token.to_base64());
        }
        for way in ways {
            line += &format!(",{}={}", way.trust.as_str(), way.name);
            for address in &way.addresses {
                line += &format!("/{address}");
            }
        }
        write!(f, "{line},sum={:08x}", sum(&line))
    }
}

impl FromStr for Introduction {
    type Err = BadLine;

    fn from_str(text: &str) -> Result<Self, BadLine> {
        let line: String = text.split_ascii_whitespace().collect();
        if !line.starts_with(FORM) {
            return Err(BadLine::Form);
        }
        let (said, end) = line.rsplit_once(",sum=").ok_or(BadLine::Sum)?;
        if end != format!("{:08x}", sum(said)) {
            return Err(BadLine::Sum);
        }
        let mut fields = said.split(',');
        if fields.next() != Some(FORM) {
            return Err(BadLine::Form);
        }
        let (mut name, mut key, mut port, mut ways) = (None, None, None, Vec::new());
        let (mut exit, mut token) = (false, None);
        for field in fields {
            let bad = |fault| BadLine::Field {
                field: field.escape_debug().to_string(),
                fault,
            };
            let (label, value) = field.split_once('=').ok_or(bad("is no field"))?;
            match label {
                "name" => name = Some(checked_name(value).ok_or(bad("is not a name"))?),
                "key" => key = Some(value.parse().map_err(|_| bad("is not a public key"))?),
                "port" => {
                    let number = value.parse().ok().filter(|port| *port != 0);
                    port = Some(number.ok_or(bad("is not a port"))?);
                }
                "exit" if value == "yes" => exit = true,
                "once" => {
                    let once =
                        Token::from_base64(value).map_err(|_| bad("is not a one-time token"));
                    token = Some(once?);
                }
                "trusted" => ways.push(way(value, Trust::Trusted).map_err(bad)?),
                "untrusted" => ways.push(way(value, Trust::Untrusted).map_err(bad)?),
                _ => return Err(bad("is of a later version of dibs, or of none")),
            }
            if ways.len() > MOST_WAYS {
                return Err(bad("is a path too many"));
            }
        }
        match (name, key, port) {
            (Some(name), Some(public_key), Some(port)) => Ok(Introduction {
                name,
                public_key,
                port,
                exit,
                token,
                ways,
            }),
            _ => Err(BadLine::Field {
                field: FORM.to_owned(),
                fault: "lacks a name, a key or a port",
            }),
        }
    }
}

fn way(text: &str, trust: Trust) -> Result<Way, &'static str> {
    let mut parts = text.split('/');
    let name = parts.next().and_then(checked_name).ok_or("has no name")?;
    let mut addresses = Vec::new();
    for part in parts {
        let address: IpAddr = part.parse().map_err(|_| "is not an address")?;
        if !is_routable(address) {
            return Err("has an address that is not one host's for others");
        }
        if addresses.len() == MOST_ADDRESSES {
            return Err("has an address too many");
        }
        addresses.push(address);
    }
    Ok(Way {
        name,
        trust,
        addresses,
    })
}

fn checked_name(text: &str) -> Option<String> {
    check::name(text).ok()
}

fn sum(text: &str) -> u32 {
    crc_fast::crc32_iscsi(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "dibs1,name=a,key=hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=,port=5300,\
                        trusted=eth0/10.0.1.1/fd00:1::1,untrusted=wlan0/10.0.2.1,untrusted=wwan0,\
                        sum=";

    fn whole(said: &str) -> String {
        let said = said.trim_end_matches(",sum=");
        format!("{said},sum={:08x}", sum(said))
    }

    #[test]
    fn a_line_says_what_was_put_in() {
        let line = whole(LINE);
        let host: Introduction = line.parse().unwrap();
        assert_eq!((host.name.as_str(), host.port), ("a", 5300));
        let ways: Vec<_> = host
            .ways
            .iter()
            .map(|way| (way.name.as_str(), way.trust, way.addresses.len()))
            .collect();
        let expected = [
            ("eth0", Trust::Trusted, 2),
            ("wlan0", Trust::Untrusted, 1),
            ("wwan0", Trust::Untrusted, 0),
        ];
        assert_eq!(ways, expected);
        assert_eq!(host.to_string(), line);
        assert!(!host.exit);
        let exit = whole(&LINE.replace("5300,", "5300,exit=yes,"));
        let told: Introduction = exit.parse().unwrap();
        assert!(told.exit && told.to_string() == exit, "{told}");
        let once = LINE.replace(
            "5300,",
            "5300,once=bHVuY2ggdG9rZW5zIGFyZSBnb29kIGZvciBvbmUgbWU=,",
        );
        let once = whole(&once);
        let told: Introduction = once.parse().unwrap();
        assert!(told.token.is_some() && told.to_string() == once);
        // Nothing that a shell takes apart.
        let plain = |c: char| c.is_ascii_alphanumeric() || ",=/:.+-_".contains(c);
        assert!(line.chars().all(plain), "{line}");
        // As mail breaks it.
        let broken = format!(" {}\n  {}\n", &line[..70], &line[70..]);
        assert_eq!(broken.parse(), Ok(host));
    }

    #[test]
    fn a_line_that_was_not_copied_whole_is_noticed() {
        let line = whole(LINE);
        for end in FORM.len()..line.len() {
            assert_eq!(line[..end].parse::<Introduction>(), Err(BadLine::Sum));
        }
        for at in FORM.len()..line.len() {
            let other = if line.as_bytes()[at] == b'1' {
                "2"
            } else {
                "1"
            };
            let mut changed = line.clone();
            changed.replace_range(at..=at, other);
            assert!(changed.parse::<Introduction>().is_err(), "{changed}");
        }
        for other in [
            "",
            "dibs",
            "name=a",
            "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=",
        ] {
            assert_eq!(other.parse::<Introduction>(), Err(BadLine::Form), "{other}");
        }
    }

    #[test]
    fn what_cannot_be_is_refused_and_named() {
        for (from, to, named) in [
            ("name=a", "name=a\"b", "is not a name"),
            ("name=a", "name=", "is not a name"),
            ("name=a,", "", "lacks a name"),
            ("key=h", "key=", "is not a public key"),
            ("port=5300", "port=0", "is not a port"),
            ("port=5300", "port=65536", "is not a port"),
            ("port=5300", "port", "is no field"),
            ("port=5300", "port=5300,exit=no", "later version"),
            ("port=5300", "port=5300,once=yes", "not a one-time"),
            ("10.0.1.1", "10.0.1", "is not an address"),
            ("10.0.1.1", "127.0.0.1", "not one host's"),
            ("10.0.1.1", "224.0.0.1", "not one host's"),
            ("fd00:1::1", "fe80::1", "not one host's"),
            ("fd00:1::1", "::", "not one host's"),
            ("trusted=eth0/", "trusted=/", "has no name"),
            ("trusted=eth0", "foreign=eth0", "later version"),
            ("dibs1", "dibs12", "begins with"),
        ] {
            let line = whole(&LINE.replacen(from, to, 1));
            let error = line.parse::<Introduction>().unwrap_err().to_string();
            assert!(error.contains(named), "{from} {to}: {error}");
        }
        for (label, times) in [("/10.0.9.9", MOST_ADDRESSES), (",trusted=x", MOST_WAYS)] {
            let line = LINE.replace(",sum=", &label.repeat(times + 1));
            let error = whole(&line).parse::<Introduction>().unwrap_err();
            assert!(error.to_string().contains("too many"), "{error}");
        }
    }
}
