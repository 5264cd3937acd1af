//! Amounts as people write them: `20 Mbit` a second, `10 GB`. Units are powers of 1000.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;

/// Rate limit of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate(u64);

/// Data cap of a path for a month.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Volume(u64);

/// Why a text is no [`Rate`] or [`Volume`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadAmount {
    /// It is not written as one.
    #[error("{0}")]
    Form(&'static str),
    /// It is too little or too much.
    #[error("it has to be within {0}")]
    Range(&'static str),
}

const RATES: [(&str, u64); 4] = [
    ("Gbit", 1_000_000_000),
    ("Mbit", 1_000_000),
    ("kbit", 1000),
    ("bit", 1),
];
const VOLUMES: [(&str, u64); 5] = [
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1000),
    ("B", 1),
];

impl Rate {
    /// Rate of so many bits a second. Below 64 kbit a datagram takes as long as a path has to answer a probe.
    ///
    /// # Errors
    /// It is not within 64 kbit and 1000 Gbit.
    pub fn new(bits: u64) -> Result<Self, BadAmount> {
        match bits {
            64_000..=1_000_000_000_000 => Ok(Self(bits)),
            _ => Err(BadAmount::Range("64 kbit and 1000 Gbit")),
        }
    }

    /// Bits a second.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Bytes a second.
    pub fn bytes(self) -> NonZeroU64 {
        NonZeroU64::new(self.0 / 8).expect("it is 64 kbit at least")
    }
}

impl Volume {
    /// Volume of so many bytes.
    ///
    /// # Errors
    /// It is not within 1 MB and 1000000 TB.
    pub fn new(bytes: u64) -> Result<Self, BadAmount> {
        match bytes {
            1_000_000..=1_000_000_000_000_000_000 => Ok(Self(bytes)),
            _ => Err(BadAmount::Range("1 MB and 1000000 TB")),
        }
    }

    /// Bytes.
    pub fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for Rate {
    type Err = BadAmount;

    fn from_str(text: &str) -> Result<Self, BadAmount> {
        let bits = amount(text, &RATES);
        Self::new(bits.ok_or(BadAmount::Form(
            "write a number with kbit, Mbit or Gbit (a second), such as \"20 Mbit\"",
        ))?)
    }
}

impl FromStr for Volume {
    type Err = BadAmount;

    fn from_str(text: &str) -> Result<Self, BadAmount> {
        let bytes = amount(text, &VOLUMES);
        Self::new(bytes.ok_or(BadAmount::Form(
            "write a number with MB, GB or TB (a month), such as \"10 GB\"",
        ))?)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        shown(self.0, &RATES, f)
    }
}

impl fmt::Display for Volume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        shown(self.0, &VOLUMES, f)
    }
}

/// `2.5 Mbit` or `2.5Mbit`; more than fits is as much as does.
fn amount(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(end);
    let unit = unit.strip_prefix(' ').unwrap_or(unit);
    let (_, unit) = units.iter().find(|(name, _)| *name == unit)?;
    let (whole, part) = match number.split_once('.') {
        Some((whole, part)) if (1..=9).contains(&part.len()) => (whole, part),
        Some(_) => return None,
        None => (number, "0"),
    };
    if whole.is_empty() || !part.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let whole = whole.parse::<u64>().unwrap_or(u64::MAX);
    let tenths = 10_u64.pow(u32::try_from(part.len()).ok()?);
    let part = u128::from(part.parse::<u64>().ok()?) * u128::from(*unit) / u128::from(tenths);
    let part = u64::try_from(part).ok()?;
    Some(whole.saturating_mul(*unit).saturating_add(part))
}

/// In the largest unit that needs three decimals at most.
fn shown(amount: u64, units: &[(&str, u64)], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let fits =
        |(_, unit): &&(&str, u64)| amount >= *unit && amount.is_multiple_of((*unit / 1000).max(1));
    let (name, unit) = units.iter().find(fits).unwrap_or(&units[units.len() - 1]);
    let (whole, rest) = (amount / unit, amount % unit);
    if rest == 0 {
        return write!(f, "{whole} {name}");
    }
    let decimals = format!("{:03}", rest / (unit / 1000));
    write!(f, "{whole}.{} {name}", decimals.trim_end_matches('0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_and_shown() {
        for (text, bits, shown) in [
            ("20 Mbit", 20_000_000, "20 Mbit"),
            ("2.5Mbit", 2_500_000, "2.5 Mbit"),
            ("64 kbit", 64_000, "64 kbit"),
            ("0.001 Gbit", 1_000_000, "1 Mbit"),
            ("1234567 bit", 1_234_567, "1234.567 kbit"),
            ("1000 Gbit", 1_000_000_000_000, "1000 Gbit"),
        ] {
            let rate: Rate = text.parse().unwrap();
            assert_eq!((rate.bits(), rate.to_string().as_str()), (bits, shown));
            assert_eq!(rate.to_string().parse(), Ok(rate));
        }
        let volume: Volume = "10 GB".parse().unwrap();
        assert_eq!(
            (volume.bytes(), volume.to_string()),
            (10_000_000_000, "10 GB".to_owned())
        );
        assert_eq!("1.5 TB".parse::<Volume>().unwrap().to_string(), "1.5 TB");
        assert_eq!("20 Mbit".parse::<Rate>().unwrap().bytes().get(), 2_500_000);
    }

    #[test]
    fn what_is_no_amount_says_how_it_is_written() {
        for text in [
            "",
            "20",
            "Mbit",
            "20 MB",
            "20 mbit",
            "20  Mbit",
            "-1 Mbit",
            ".5 Mbit",
            "1. Mbit",
            "1.2.3 Mbit",
            "20 Mbit/s",
            "1,5 Mbit",
            "1.1234567890 Mbit",
        ] {
            let wrong = text.parse::<Rate>();
            assert!(
                matches!(wrong, Err(BadAmount::Form(_))),
                "{text}: {wrong:?}"
            );
        }
        for text in [
            "0 Mbit",
            "63 kbit",
            "1001 Gbit",
            "99999999999999999999999 Gbit",
        ] {
            let wrong = text.parse::<Rate>();
            assert!(
                matches!(wrong, Err(BadAmount::Range(_))),
                "{text}: {wrong:?}"
            );
        }
        assert!("10 Gbit".parse::<Volume>().is_err() && "1 kB".parse::<Volume>().is_err());
    }
}
