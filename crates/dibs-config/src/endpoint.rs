//! Endpoints: addresses and names at which peers listen.

use std::fmt;
use std::net::SocketAddr;

use dibs_settings::Wrong;

use crate::check;

/// Place where a peer listens, seen from a local path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `10.0.1.2:5300`
    Address(SocketAddr),
    /// `home.example.net:5300`: a name that the system's resolver is asked for, again and again.
    Name {
        /// The name, as the file has it.
        host: String,
        /// UDP port, not 0.
        port: u16,
    },
}

impl Endpoint {
    /// The address, if it is not a name.
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Endpoint::Address(address) => Some(*address),
            Endpoint::Name { .. } => None,
        }
    }

    /// The name, if it has one.
    pub fn host(&self) -> Option<&str> {
        match self {
            Endpoint::Address(_) => None,
            Endpoint::Name { host, .. } => Some(host),
        }
    }

    /// The port.
    pub fn port(&self) -> u16 {
        match self {
            Endpoint::Address(address) => address.port(),
            Endpoint::Name { port, .. } => *port,
        }
    }
}

impl From<SocketAddr> for Endpoint {
    fn from(address: SocketAddr) -> Self {
        Endpoint::Address(address)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Address(address) => address.fmt(f),
            Endpoint::Name { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

/// An address or a name, with a port.
pub(crate) fn endpoint(text: &str) -> Result<Endpoint, Wrong> {
    let no_address = match check::address_with_port(text) {
        Ok(address) => return Ok(address.into()),
        Err(wrong) => wrong,
    };
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (text, None),
    };
    if !is_host_name(host) {
        return Err(no_address);
    }
    let Some(port) = port else {
        let hint = format!("write \"{host}:5300\"");
        return Err(Wrong::new(format!("\"{host}\" has no port"), hint));
    };
    match port.parse() {
        Ok(port) if port > 0 => Ok(Endpoint::Name {
            host: host.to_owned(),
            port,
        }),
        _ => Err(Wrong::new(
            format!("\"{}\" is not a port", port.escape_debug()),
            "a port is a number from 1 to 65535",
        )),
    }
}

/// True if this can be the name of a host (RFC 1123, 2.1; with underscores, which resolvers take). A last label that is
/// a number makes it an address.
fn is_host_name(text: &str) -> bool {
    let text = text.strip_suffix('.').unwrap_or(text);
    let is_label = |label: &str| {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        (1..=63).contains(&label.len())
            && label.bytes().all(fits)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let is_number = |label: &str| {
        let hexadecimal = label.strip_prefix("0x").or(label.strip_prefix("0X"));
        label.bytes().all(|byte| byte.is_ascii_digit())
            || hexadecimal.is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
    };
    let last = text.rsplit('.').next().unwrap_or(text);
    text.len() <= 253 && text.split('.').all(is_label) && !is_number(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_or_a_name_with_a_port() {
        for text in ["10.0.1.2:5300", "[fd00::2]:1"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(endpoint(text).unwrap(), Endpoint::Address(address));
        }
        for text in [
            "home.example.net:5300",
            "home.example.net.:5300",
            "server:1",
            "xn--bcher-kva.example:65535",
            "_dibs.4you.example:443",
            "1.2.3.4.example:5300",
        ] {
            let named = endpoint(text).unwrap();
            assert_eq!(named.to_string(), text);
            assert!(named.address().is_none() && named.port() > 0);
        }
    }

    #[test]
    fn others_are_refused_with_what_to_write() {
        let hint = |text: &str| endpoint(text).unwrap_err().hint.unwrap();
        assert_eq!(hint("fd00::2"), "write \"[fd00::2]:5300\"");
        assert_eq!(hint("10.0.1.2"), "write \"10.0.1.2:5300\"");
        assert_eq!(hint("home.example.net"), "write \"home.example.net:5300\"");
        let long = format!("{}:5300", "a.".repeat(128));
        for bad in [
            "10.0.1.2:0",
            "0.0.0.0:1",
            "10.0.1.2:65536",
            "224.0.0.1:5",
            "10.0.1:5300",
            "10.0.1.256:5300",
            "0x7f000001:5300",
            "server:0",
            "server:65536",
            "server:dibs",
            "-server:5300",
            "ser ver:5300",
            "b\u{fc}cher.example:5300",
            "home..example.net:5300",
            ":5300",
            ".:5300",
            "",
            &long,
        ] {
            assert!(endpoint(bad).is_err(), "{bad}");
        }
    }
}
