//! The shapes of single values.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use dibs_settings::{Opening, Place, PortRange, Wrong, interface, port_range, steered_prefix};
use ipnet::IpNet;

use crate::table::{Many, Word, fault};
use crate::{BadAmount, Endpoint, PublicKey, Rate, Volume, endpoint};

/// Functions by which serde reads what has shape: `deserialize_with` of a field that has the type or is an option of it.
pub(crate) mod read {
    use std::collections::BTreeMap;
    use std::fmt::Display;

    use dibs_settings::{Form, Term};
    use serde::de::{DeserializeSeed, Error};
    use serde::{Deserialize, Deserializer};

    use super::*;

    macro_rules! texts {
        ($($name:ident: $parse:expr => $type:ty;)*) => {$(
            pub(crate) fn $name<'de, D: Deserializer<'de>, T: From<$type>>(from: D) -> Result<T, D::Error> {
                let text = String::deserialize(from)?;
                $parse(&text).map(T::from).map_err(|wrong| fault(wrong, None))
            }
        )*};
    }

    texts! {
        name: super::name => String;
        interface: dibs_settings::interfaces => String;
        device: super::device => String;
        local_address: super::local_address => IpAddr;
        loopback: super::loopback => SocketAddr;
        endpoint: endpoint::endpoint => Endpoint;
        public_key: super::public_key => PublicKey;
        file: super::file => PathBuf;
        absolute: super::absolute => PathBuf;
        socket: super::socket => PathBuf;
        rate: super::amount => Rate;
        volume: super::amount => Volume;
    }

    /// A whole number from `LOW` to `HIGH`.
    pub(crate) fn whole<'de, const LOW: i64, const HIGH: i64, N, D, T>(
        from: D,
    ) -> Result<T, D::Error>
    where
        N: TryFrom<i128>,
        D: Deserializer<'de>,
        T: From<N>,
    {
        let number = i128::deserialize(from)?;
        let fits = (LOW.into()..=HIGH.into()).contains(&number);
        let number = N::try_from(number).ok().filter(|_| fits);
        number.map(T::from).ok_or_else(|| within(LOW, HIGH))
    }

    /// A number from `LOW` to `HIGH`, with or without a fraction.
    pub(crate) fn number<'de, const LOW: u32, const HIGH: u32, D>(from: D) -> Result<f64, D::Error>
    where
        D: Deserializer<'de>,
    {
        let number = f64::deserialize(from)?;
        let fits = (LOW.into()..=HIGH.into()).contains(&number);
        fits.then_some(number).ok_or_else(|| within(LOW, HIGH))
    }

    pub(crate) fn mark_mask<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
        let mask = whole::<0, { u32::MAX as i64 }, u32, _, _>(from)?;
        super::mark_mask(mask).map_err(|wrong| fault(wrong, None))
    }

    fn within<E: Error>(low: impl Display, high: impl Display) -> E {
        E::custom(format!("has to be within {low} and {high}"))
    }

    fn each<T, E: Error>(
        words: &[String],
        parse: impl Fn(&str) -> Result<T, Wrong>,
    ) -> Result<Vec<T>, E> {
        let parse =
            |(at, word): (usize, &String)| parse(word).map_err(|wrong| fault(wrong, Some(at)));
        words.iter().enumerate().map(parse).collect()
    }

    /// Texts or whole numbers, or only one.
    fn words<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
        let words = Many::<Word>::deserialize(from)?.0;
        Ok(words.into_iter().map(|word| word.0).collect())
    }

    fn some<T, E: Error>(list: Vec<T>) -> Result<Vec<T>, E> {
        match list.is_empty() {
            true => Err(E::custom("is empty")),
            false => Ok(list),
        }
    }

    macro_rules! lists {
        ($($name:ident: $parse:expr => $type:ty, $words:expr;)*) => {$(
            pub(crate) fn $name<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<$type>, D::Error> {
                each(&$words(from)?, $parse)
            }
        )*};
    }

    lists! {
        openings: super::opening => Opening, words;
        networks: super::steered_prefix => IpNet, |from| some(Vec::deserialize(from)?);
        hosts: super::host => IpAddr, words;
    }

    /// The term of a key.
    pub(crate) struct OfKey<'k>(pub(crate) &'k str);

    impl<'de> DeserializeSeed<'de> for OfKey<'_> {
        type Value = Vec<Term>;

        fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Vec<Term>, D::Error> {
            let key = self.0;
            let texts = match Term::kind(key).map(|(form, _)| form) {
                Some(Form::Words) => some(words(from)?)?,
                Some(Form::Word) => vec![Word::deserialize(from)?.0],
                Some(Form::Number) => vec![i128::deserialize(from)?.to_string()],
                Some(Form::Text) | None => vec![String::deserialize(from)?],
            };
            each(&texts, |text| Term::parse(key, text))
        }
    }

    /// The endpoints of a peer by local path.
    pub(crate) fn endpoints<'de, D>(from: D) -> Result<Vec<(String, Endpoint)>, D::Error>
    where
        D: Deserializer<'de>,
    {
        #[derive(Deserialize)]
        struct Listed(#[serde(deserialize_with = "endpoint")] Endpoint);
        let listed = BTreeMap::<String, Listed>::deserialize(from)?;
        Ok(listed
            .into_iter()
            .map(|(path, Listed(at))| (path, at))
            .collect())
    }
}

/// `22`, `8000-8010`, `10.0.1.1:22`, `[fd00::1]:8000-8010`, `paths` or `any`.
pub(crate) fn opening(text: &str) -> Result<Opening, Wrong> {
    let (place, ports) = match text {
        "paths" => return Ok(Opening::PATHS),
        "any" => return Ok(Opening::ANY),
        _ => match text.rsplit_once(':') {
            Some((address, ports)) => (address_of(address).map(Place::Address), ports),
            None => (Some(Place::Paths), text),
        },
    };
    match (place, port_range(ports)) {
        (Some(place), Ok(PortRange { first, last })) => Ok(Opening { place, first, last }),
        _ => Err(Wrong::new(
            format!(
                "\"{}\" is neither a port nor an address with port",
                text.escape_debug()
            ),
            "write \"22\" or \"8000-8010\" for ports at the addresses of the paths' interfaces, \"10.9.0.1:22\" or \
             \"[fd00::1]:22\" for another address, \"paths\" for all ports of the former, \"any\" for everything",
        )),
    }
}

/// `10.0.1.1` or `[fd00::1]`: a host's, as connections use it.
fn address_of(text: &str) -> Option<IpAddr> {
    let bare = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'));
    let address: IpAddr = match bare {
        Some(text) => text.parse::<Ipv6Addr>().ok()?.into(),
        None => text.parse::<Ipv4Addr>().ok()?.into(),
    };
    let usable = !(address.is_loopback() || address.is_unspecified() || address.is_multicast());
    usable.then_some(address)
}

/// A mask that is one run of at least six bits: four for the bump id, OVERRIDE, LOCKED.
pub(crate) fn mark_mask(mask: u32) -> Result<u32, Wrong> {
    let run = mask.checked_shr(mask.trailing_zeros()).unwrap_or(0);
    if run.wrapping_add(1) & run != 0 || mask == 0 {
        return Err(Wrong::new(
            format!("{mask:#x} is not one run of bits"),
            "such as the default 0x3f000000",
        ));
    }
    if mask.count_ones() < 6 {
        return Err(Wrong::new(
            format!(
                "{mask:#x} has {} bits, but six are needed",
                mask.count_ones()
            ),
            "such as the default 0x3f000000",
        ));
    }
    Ok(mask)
}

/// A local address that a socket can be bound to and a peer can answer.
pub(crate) fn local_address(text: &str) -> Result<IpAddr, Wrong> {
    match text.parse::<IpAddr>() {
        Ok(address) if address.is_unspecified() || address.is_multicast() => Err(Wrong::bare(
            format!("\"{address}\" is not the address of one interface"),
        )),
        Ok(address) => Ok(address),
        Err(_) => Err(Wrong::new(
            format!("\"{}\" is not an address", text.escape_debug()),
            "write \"10.0.1.1\", without prefix length",
        )),
    }
}

/// An address that a host in a network can have.
pub(crate) fn host(text: &str) -> Result<IpAddr, Wrong> {
    let address = local_address(text)?;
    let broadcast = address == IpAddr::V4(Ipv4Addr::BROADCAST);
    match address.is_loopback() || broadcast {
        true => Err(Wrong::bare(format!(
            "\"{address}\" is not an address of one host in a network"
        ))),
        false => Ok(address),
    }
}

/// An address with port.
pub(crate) fn address_with_port(text: &str) -> Result<SocketAddr, Wrong> {
    let wrong = match text.parse::<SocketAddr>() {
        Ok(endpoint) if endpoint.port() == 0 => "has port 0",
        Ok(endpoint) if endpoint.ip().is_unspecified() || endpoint.ip().is_multicast() => {
            "is not an address of one host"
        }
        Ok(endpoint) => return Ok(endpoint),
        Err(_) => match text.trim_matches(['[', ']']).parse::<IpAddr>() {
            Ok(IpAddr::V4(address)) => {
                return Err(Wrong::new(
                    "has no port",
                    format!("write \"{address}:5300\""),
                ));
            }
            Ok(IpAddr::V6(address)) => {
                return Err(Wrong::new(
                    "has no port",
                    format!("write \"[{address}]:5300\""),
                ));
            }
            Err(_) => "is not an address with port",
        },
    };
    Err(Wrong::new(
        format!("\"{}\" {wrong}", text.escape_debug()),
        "write \"10.0.1.2:5300\", \"[fd00::2]:5300\" or \"home.example.net:5300\"",
    ))
}

/// A loopback address with port: what listens there asks nobody who he is (docs/threat-model.md, "Keys and the host").
pub(crate) fn loopback(text: &str) -> Result<SocketAddr, Wrong> {
    let address = address_with_port(text)
        .map_err(|wrong| Wrong::new(wrong.message, "write \"127.0.0.1:9477\" or \"[::1]:9477\""))?;
    match address.ip().is_loopback() {
        true => Ok(address),
        false => Err(Wrong::new(
            format!("\"{address}\" is not a loopback address, and metrics have no authentication"),
            "write \"127.0.0.1:9477\"; for other hosts, use a proxy with authentication",
        )),
    }
}

/// The name of a path, peer or bump: fit for a table, a comment in iptables and a command line.
pub(crate) fn name(text: &str) -> Result<String, Wrong> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    if (1..=32).contains(&text.len()) && text.chars().all(fits) && !text.starts_with(['-', '.']) {
        return Ok(text.to_owned());
    }
    Err(Wrong::new(
        format!("\"{}\" is not a name", text.escape_debug()),
        "1 to 32 letters, digits, \"_\", \"-\" and \".\", the first not \"-\" or \".\"",
    ))
}

/// The device of a bump: an interface of another program's.
pub(crate) fn device(text: &str) -> Result<String, Wrong> {
    let name = interface(text)?;
    let is_ours = |rest: &str| rest.parse::<u8>().is_ok_and(|number| number < 16);
    if name.strip_prefix("dibs").is_some_and(is_ours) {
        return Err(Wrong::new(
            format!("\"{name}\" is a name of dibsd's own devices"),
            "write the device of a VPN, such as \"tun9\"",
        ));
    }
    if matches!(name.as_str(), "lo" | "all" | "default") || name.contains(':') {
        return Err(Wrong::new(
            format!("\"{name}\" is not a TUN or TAP device"),
            "write the device of a VPN, such as \"tun9\"",
        ));
    }
    Ok(name)
}

/// A public key, as `dibsctl pubkey` prints it.
fn public_key(text: &str) -> Result<PublicKey, Wrong> {
    let hint = "`dibsctl pubkey` prints it, 44 characters long";
    let parsed = text.parse();
    parsed.map_err(|error: crate::KeyError| Wrong::new(error.to_string(), hint))
}

/// A rate or a volume.
fn amount<T: FromStr<Err = BadAmount>>(text: &str) -> Result<T, Wrong> {
    text.parse().map_err(|bad| match bad {
        BadAmount::Form(hint) => Wrong::new(format!("cannot be \"{}\"", text.escape_debug()), hint),
        BadAmount::Range(range) => Wrong::bare(format!("has to be within {range}")),
    })
}

fn file(text: &str) -> Result<PathBuf, Wrong> {
    match text {
        "" => Err(Wrong::bare("is empty")),
        text if text.contains('\0') => Err(Wrong::bare("has a zero byte")),
        text => Ok(PathBuf::from(text)),
    }
}

/// From wherever the daemon starts, it is to be the same.
fn absolute(text: &str) -> Result<PathBuf, Wrong> {
    let path = file(text)?;
    match path.is_absolute() {
        true => Ok(path),
        false => Err(Wrong::new("is not an absolute path", "begin it with /")),
    }
}

/// A socket's address has room for 107 bytes and a zero: unix(7). The daemon keeps its state and its lock
/// beside the socket, in files that have its name but for these endings.
fn socket(text: &str) -> Result<PathBuf, Wrong> {
    // Choices lie beside it: from another directory the next daemon would not find them.
    let path = absolute(text)?;
    if let Some(taken) = { path.extension() }.filter(|end| *end == "state" || *end == "lock") {
        return Err(Wrong::bare(format!(
            "ends in .{}, as the file beside it that the daemon keeps",
            taken.display()
        )));
    }
    match path.as_os_str().len() {
        0..=107 => Ok(path),
        long => Err(Wrong::bare(format!(
            "is {long} bytes long, and the path of a socket at most 107"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use dibs_settings::Term;

    use super::*;

    fn user(text: &str) -> Result<Term, Wrong> {
        Term::parse("user", text)
    }

    #[test]
    fn mark_masks() {
        for good in [0x3f00_0000, 0x3f, 0xfc00_0000, u32::MAX, 0x0007_f800] {
            assert_eq!(mark_mask(good).unwrap(), good);
        }
        for bad in [0, 1, 0x1f, 0x3f00_0001, 0x7e00_7e00, 0xf800_0000] {
            assert!(mark_mask(bad).is_err(), "{bad:#x}");
        }
    }

    #[test]
    fn names_carry_nothing_into_commands() {
        for bad in [
            "",
            "-j",
            "a b",
            "a\nb",
            "a;b",
            "a+",
            "..",
            "x\u{e9}",
            "\"",
            &"x".repeat(128),
        ] {
            assert!(
                name(bad).is_err() && interface(bad).is_err() && user(bad).is_err(),
                "{bad:?}"
            );
        }
        assert!(name(&"x".repeat(33)).is_err() && user(&"x".repeat(33)).is_err());
        assert!(interface("enx0123456789ab-altname").is_ok() && interface("wlp0s20f3").is_ok());
        assert!(user("machine$").is_ok() && user("www-data").is_ok());
    }
}
