//! The shapes of single values.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use dibs_settings::{Opening, Place};
use ipnet::IpNet;

use crate::table::{Many, Word, Wrong};
use crate::{BadAmount, Endpoint, MatchExpr, PublicKey, Rate, Volume, endpoint};

/// Ports `first..=last`, `first <= last`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    /// Lowest, at least 1.
    pub first: u16,
    /// Highest.
    pub last: u16,
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last {
            write!(f, "{}", self.first)
        } else {
            write!(f, "{}-{}", self.first, self.last)
        }
    }
}

/// A part of each day by the host's local time, from `start` up to, not including, `end`, in
/// minutes after midnight. `end` below `start` reaches into the next day.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DaySpan {
    /// 0 to 1439.
    pub start: u16,
    /// 0 to 1439, not `start`.
    pub end: u16,
}

impl DaySpan {
    /// Whether a minute after midnight lies within.
    pub fn contains(self, minute: u16) -> bool {
        if self.start < self.end {
            (self.start..self.end).contains(&minute)
        } else {
            minute >= self.start || minute < self.end
        }
    }
}

impl fmt::Display for DaySpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (start, end) = (self.start, self.end);
        write!(
            f,
            "{:02}:{:02}-{:02}:{:02}",
            start / 60,
            start % 60,
            end / 60,
            end % 60
        )
    }
}

/// Functions by which serde reads what has shape: `deserialize_with` of a field that has the type or is an option of it.
pub(crate) mod read {
    use std::collections::BTreeMap;
    use std::fmt::Display;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer};

    use super::*;

    macro_rules! texts {
        ($($name:ident: $parse:expr => $type:ty;)*) => {$(
            pub(crate) fn $name<'de, D: Deserializer<'de>, T: From<$type>>(from: D) -> Result<T, D::Error> {
                let text = String::deserialize(from)?;
                $parse(&text).map(T::from).map_err(D::Error::custom)
            }
        )*};
    }

    texts! {
        name: super::name => String;
        interface: super::interface => String;
        steered_interface: super::steered_interface => String;
        device: super::device => String;
        user: super::user => String;
        local_address: super::local_address => IpAddr;
        loopback: super::loopback => SocketAddr;
        endpoint: endpoint::endpoint => Endpoint;
        day_span: super::day_span => DaySpan;
        match_expr: MatchExpr::parse => MatchExpr;
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
        super::mark_mask(mask).map_err(D::Error::custom)
    }

    fn within<E: Error>(low: impl Display, high: impl Display) -> E {
        E::custom(format!("has to be within {low} and {high}"))
    }

    fn each<T, E: Error>(
        words: &[String],
        parse: fn(&str) -> Result<T, Wrong>,
    ) -> Result<Vec<T>, E> {
        let parse =
            |(at, word): (usize, &String)| parse(word).map_err(|wrong| wrong.of_element(at));
        words
            .iter()
            .enumerate()
            .map(parse)
            .collect::<Result<_, _>>()
            .map_err(E::custom)
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
        ports: super::port_range => PortRange, |from| some(words(from)?);
        prefixes: super::steered_prefix => IpNet, |from| some(words(from)?);
        networks: super::steered_prefix => IpNet, |from| some(Vec::deserialize(from)?);
    }

    pub(crate) fn dscp<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u8>, D::Error> {
        let word = Word::deserialize(from)?.0;
        super::dscp(&word).map(Some).map_err(D::Error::custom)
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

/// `8000-8010`, or `80`.
pub(crate) fn port_range(text: &str) -> Result<PortRange, Wrong> {
    let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0);
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (port(first), port(last)) {
        (Some(first), Some(last)) if first <= last => Ok(PortRange { first, last }),
        _ if text.parse::<i128>().is_ok() => Err(Wrong::bare("has to be within 1 and 65535")),
        _ => Err(Wrong::new(
            format!(
                "\"{}\" is not a port or a range of ports",
                text.escape_debug()
            ),
            "a port is 80, a range \"8000-8010\", several [80, \"8000-8010\"]",
        )),
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
                "\"{}\" is nothing that a peer may open",
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

/// `08:00-18:00`
pub(crate) fn day_span(text: &str) -> Result<DaySpan, Wrong> {
    let number = |text: &str, limit: u16| {
        let digits = text.len() == 2 && text.bytes().all(|b| b.is_ascii_digit());
        text.parse::<u16>()
            .ok()
            .filter(|number| digits && *number < limit)
    };
    let minute = |text: &str| {
        let (hour, minute) = text.split_once(':')?;
        Some(number(hour, 24)? * 60 + number(minute, 60)?)
    };
    let parsed = text
        .split_once('-')
        .and_then(|(start, end)| Some((minute(start)?, minute(end)?)));
    match parsed {
        Some((start, end)) if start == end => Err(Wrong::new(
            format!("\"{text}\" is empty"),
            "leave time out for a rule that always holds",
        )),
        Some((start, end)) => Ok(DaySpan { start, end }),
        None => Err(Wrong::new(
            format!("\"{}\" is not a part of a day", text.escape_debug()),
            "write \"08:00-18:00\"",
        )),
    }
}

/// The name of a code point: RFC 2474, RFC 2597, RFC 3246, RFC 8622.
pub(crate) fn dscp(text: &str) -> Result<u8, Wrong> {
    let named = match text.as_bytes() {
        b"EF" => Some(46),
        b"LE" => Some(1),
        [b'C', b'S', class @ b'0'..=b'7'] => Some((class - b'0') << 3),
        [b'A', b'F', class @ b'1'..=b'4', drop @ b'1'..=b'3'] => {
            Some(((class - b'0') << 3) | ((drop - b'0') << 1))
        }
        _ => text.parse().ok().filter(|number| *number < 64),
    };
    named.ok_or_else(|| match text.parse::<i128>() {
        Ok(_) => Wrong::bare("has to be within 0 and 63"),
        Err(_) => Wrong::new(
            format!("\"{}\" is no DSCP", text.escape_debug()),
            "write 0 to 63, or \"EF\", \"CS1\", \"AF21\"",
        ),
    })
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
                "{mask:#x} has {} bits, and six are needed",
                mask.count_ones()
            ),
            "such as the default 0x3f000000",
        ));
    }
    Ok(mask)
}

/// A network, or an address, which stands for itself alone.
pub(crate) fn prefix(text: &str) -> Result<IpNet, Wrong> {
    let parsed = text
        .parse::<IpNet>()
        .or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    match parsed {
        Ok(net) if net.trunc() != net => Err(Wrong::new(
            format!("\"{net}\" has bits set behind its prefix length"),
            format!("{} or {}/{}", net.trunc(), net.addr(), net.max_prefix_len()),
        )),
        Ok(net) => Ok(net),
        Err(_) => Err(Wrong::new(
            format!(
                "\"{}\" is not an address with prefix length",
                text.escape_debug()
            ),
            "write \"10.0.1.2/32\" or \"fd00::/64\"",
        )),
    }
}

/// A prefix that traffic may be steered to (docs/threat-model.md, "The peer").
pub(crate) fn steered_prefix(text: &str) -> Result<IpNet, Wrong> {
    let net = prefix(text)?;
    let address = net.network();
    if net.prefix_len() > 0 && (address.is_loopback() || address.is_multicast()) {
        let kind = if address.is_loopback() {
            "loopback"
        } else {
            "multicast"
        };
        return Err(Wrong::bare(format!(
            "\"{net}\" is {kind}, which is never steered"
        )));
    }
    Ok(net)
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

/// An address with port.
pub(crate) fn address_with_port(text: &str) -> Result<SocketAddr, Wrong> {
    let wrong = match text.parse::<SocketAddr>() {
        Ok(endpoint) if endpoint.port() == 0 => "has port 0",
        Ok(endpoint) if endpoint.ip().is_unspecified() || endpoint.ip().is_multicast() => {
            "is not the address of one host"
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
            format!(
                "\"{address}\" is no loopback address, and what listens there asks nobody who he is"
            ),
            "write \"127.0.0.1:9477\", and let a proxy that asks pass it on to other hosts",
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

/// The name of an interface, its own or an alternative one: what the kernel takes, less what shells and iptables (`+`)
/// misread.
pub(crate) fn interface(text: &str) -> Result<String, Wrong> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "_.-:@".contains(c);
    if (1..=127).contains(&text.len()) && text.chars().all(fits) && !text.starts_with(['-', '.']) {
        return Ok(text.to_owned());
    }
    Err(Wrong::new(
        format!(
            "\"{}\" is not the name of an interface",
            text.escape_debug()
        ),
        "letters, digits and \"_.-:@\", as `ip link` shows it, or one of its altnames there",
    ))
}

/// The interface of a rule, as iptables and paths under /proc/sys take it.
pub(crate) fn steered_interface(text: &str) -> Result<String, Wrong> {
    let name = interface(text)?;
    let fits = name.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
    if !fits || matches!(name.as_str(), "lo" | "all" | "default") || name.contains(':') {
        return Err(Wrong::new(
            format!("\"{name}\" is not an interface that leads to a peer"),
            "write a name that `ip link` shows, such as \"eth0\"",
        ));
    }
    Ok(name)
}

/// The device of a bump: an interface of another program's.
pub(crate) fn device(text: &str) -> Result<String, Wrong> {
    let name = interface(text)?;
    let is_ours = |rest: &str| rest.parse::<u8>().is_ok_and(|number| number < 16);
    if name.strip_prefix("dibs").is_some_and(is_ours) {
        return Err(Wrong::new(
            format!("\"{name}\" is a name of dibsd's own devices"),
            "name the device of a VPN, such as \"tun9\"",
        ));
    }
    if matches!(name.as_str(), "lo" | "all" | "default") || name.contains(':') {
        return Err(Wrong::new(
            format!("\"{name}\" is not a TUN or TAP device"),
            "name the device of a VPN, such as \"tun9\"",
        ));
    }
    Ok(name)
}

/// The name of a user.
pub(crate) fn user(text: &str) -> Result<String, Wrong> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "_.-@".contains(c);
    let body = text.strip_suffix('$').unwrap_or(text);
    if (1..=32).contains(&body.len()) && body.chars().all(fits) && !body.starts_with(['-', '.']) {
        return Ok(text.to_owned());
    }
    Err(Wrong::new(
        format!("\"{}\" is not the name of a user", text.escape_debug()),
        "for a number use uid",
    ))
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
        false => Err(Wrong::bare("is not an absolute path")),
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
    use super::*;

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
    fn day_spans_may_cross_midnight() {
        let day = day_span("08:00-18:00").unwrap();
        assert!(day.contains(8 * 60) && day.contains(17 * 60 + 59));
        assert!(!day.contains(7 * 60 + 59) && !day.contains(18 * 60));
        let night = day_span("22:30-06:00").unwrap();
        assert!(night.contains(23 * 60) && night.contains(0) && !night.contains(12 * 60));
        assert_eq!(night.to_string(), "22:30-06:00");
        for bad in [
            "08:00",
            "8:00-18:00",
            "08:00-24:00",
            "08:60-09:00",
            "+8:00-09:00",
            "1:1-2:2",
        ] {
            assert!(day_span(bad).is_err(), "{bad}");
        }
        assert!(day_span("08:00-08:00").is_err());
    }

    #[test]
    fn code_points() {
        for (text, number) in [
            ("EF", 46),
            ("CS0", 0),
            ("CS7", 56),
            ("AF11", 10),
            ("AF43", 38),
            ("LE", 1),
            ("63", 63),
        ] {
            assert_eq!(dscp(text).unwrap(), number, "{text}");
        }
        for bad in ["", "64", "CS8", "AF14", "AF50", "ef", "-1", "EF\n"] {
            assert!(dscp(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn port_ranges() {
        assert_eq!(
            port_range("80").unwrap(),
            PortRange {
                first: 80,
                last: 80
            }
        );
        assert_eq!(port_range("8000-8010").unwrap().to_string(), "8000-8010");
        for bad in ["0", "", "-", "9-8", "1-65536", "http", "1 - 2"] {
            assert!(port_range(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn prefixes() {
        assert_eq!(prefix("10.0.1.2").unwrap().to_string(), "10.0.1.2/32");
        assert_eq!(prefix("fd00::/64").unwrap().to_string(), "fd00::/64");
        assert!(
            prefix("10.0.1.2/24")
                .unwrap_err()
                .hint
                .unwrap()
                .contains("10.0.1.0/24")
        );
        for bad in ["10.0.1/24", "10.0.1.2/33", "host", "fd00::/129", ""] {
            assert!(prefix(bad).is_err(), "{bad}");
        }
        assert!(steered_prefix("0.0.0.0/0").is_ok());
        assert!(steered_prefix("127.0.0.0/8").is_err() && steered_prefix("ff02::/16").is_err());
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
