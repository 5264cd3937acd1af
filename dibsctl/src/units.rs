//! Numbers that people read.

use std::ops::RangeInclusive;

/// `1 path`, `2 paths`
pub fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// `512 B`, `1.5 KiB`
pub fn bytes(bytes: u64) -> String {
    scaled(
        bytes as f64,
        1024.0,
        &["B", "KiB", "MiB", "GiB", "TiB", "PiB"],
    )
}

/// `512 B`, `1.5 GB`: as volumes are agreed on.
pub fn volume(bytes: u64) -> String {
    scaled(bytes as f64, 1000.0, &["B", "kB", "MB", "GB", "TB", "PB"])
}

/// Bytes per second as `1.5 Mbit/s`.
pub fn rate(bytes: u64) -> String {
    scaled(
        bytes as f64 * 8.0,
        1000.0,
        &["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"],
    )
}

/// Microseconds as `27 us`, `1.5 ms`.
pub fn micros(micros: u64) -> String {
    scaled(micros as f64, 1000.0, &["us", "ms", "s"])
}

/// A part of one as `0.1 %`.
pub fn percent(part: f64) -> String {
    let text = format!("{:.2}", part * 100.0);
    format!("{} %", text.trim_end_matches('0').trim_end_matches('.'))
}

/// Seconds as `42s`, `3m12s`, `5h3m`, `2d5h`.
pub fn age(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match () {
        () if days > 0 => format!("{days}d{}h", hours % 24),
        () if hours > 0 => format!("{hours}h{}m", minutes % 60),
        () if minutes > 0 => format!("{minutes}m{}s", seconds % 60),
        () => format!("{seconds}s"),
    }
}

/// Seconds that an option gives, within limits.
pub fn seconds(text: &str, limits: RangeInclusive<f64>) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    match limits.contains(&seconds) {
        true => Ok(seconds),
        false => Err(format!(
            "from {} to {} seconds",
            limits.start(),
            limits.end()
        )),
    }
}

/// The word that a value is in JSON.
pub fn word(value: impl serde::Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        _ => String::new(),
    }
}

/// Text from elsewhere (the name of a process, say) without what terminals obey.
pub fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

fn scaled(value: f64, base: f64, units: &[&str]) -> String {
    // 999.95 rounds to 1000.0, which belongs to the next unit.
    let limit = base - 0.05;
    let mut value = value;
    let mut unit = 0;
    while value >= limit && unit + 1 < units.len() {
        value /= base;
        unit += 1;
    }
    let text = format!("{value:.1}");
    format!(
        "{} {}",
        text.strip_suffix(".0").unwrap_or(&text),
        units[unit]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_readable() {
        assert_eq!(
            [bytes(0), bytes(1023), bytes(1536)],
            ["0 B", "1023 B", "1.5 KiB"]
        );
        assert_eq!(bytes(1024 * 1024 - 1), "1 MiB");
        assert_eq!(bytes(u64::MAX), "16384 PiB");
        assert_eq!([rate(125), rate(125_000_000)], ["1 kbit/s", "1 Gbit/s"]);
        assert_eq!([volume(999), volume(10_000_000_000)], ["999 B", "10 GB"]);
        assert_eq!(
            [micros(27), micros(1500), micros(90_000_000)],
            ["27 us", "1.5 ms", "90 s"]
        );
        assert_eq!(
            [percent(0.0), percent(0.001), percent(1.0)],
            ["0 %", "0.1 %", "100 %"]
        );
        assert_eq!([age(42), age(192), age(18_180)], ["42s", "3m12s", "5h3m"]);
        assert_eq!(age(190_800), "2d5h");
        assert_eq!([count(1, "path"), count(0, "path")], ["1 path", "0 paths"]);
    }

    #[test]
    fn terminals_are_not_commanded() {
        assert_eq!(
            printable("a\x1b[31mb\n\u{9b}c"),
            "a\u{fffd}[31mb\u{fffd}\u{fffd}c"
        );
    }
}
