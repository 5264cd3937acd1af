//! What was seen and read, for people.

use std::fmt::{self, Display, Write as _};

use dibs_eavesdrop::{Direction, How, Kind, Piece, Report, Statistics, hex, text};
use dibsctl::units::{bytes, count, percent};

use crate::hearing::Connection;

/// Lines of the packets that are shown.
const LINES: usize = 6;
/// Bytes of text that are printed of a piece; all of it is in the answer in JSON.
const PRINTED: usize = 16 << 10;

pub(super) fn connection(connection: &Connection) -> String {
    let Connection {
        id,
        local,
        remote,
        bump,
        bytes_by_path,
        bytes: all,
    } = connection;
    let passed = match all {
        0 => "none of its data used a bump in this time".to_owned(),
        all => format!(
            "{} of its {} on bumps in this time used this path, as counted here; the datagrams are those of all \
             connections with that peer",
            percent(*bytes_by_path as f64 / *all as f64),
            bytes(*all)
        ),
    };
    format!("connection {id}, {local} to {remote}, on {bump}: {passed}\n")
}

pub(super) fn report(report: &Report) -> String {
    let mut out = String::new();
    write_report(&mut out, report).expect("a string takes it");
    out
}

fn write_report(out: &mut String, report: &Report) -> fmt::Result {
    let Report {
        packets,
        others,
        handshakes,
        beyond,
        further,
        plain,
        directions,
    } = report;
    writeln!(
        out,
        "{}, {others} of them neither TCP nor dibs",
        count(*packets as usize, "packet")
    )?;
    if *handshakes > 0 {
        writeln!(
            out,
            "{} of dibs: the hosts call this path trusted, and exchange keys here",
            count(*handshakes as usize, "handshake")
        )?;
    }
    if *beyond > 0 {
        let beyond = count(*beyond as usize, "datagram");
        writeln!(out, "{beyond} found no room and are left out")?;
    }
    if *further > 0 {
        let further = count(*further as usize, "datagram");
        writeln!(
            out,
            "{further} belong to directions beyond the first {} and are left out",
            directions.len()
        )?;
    }
    if plain.bytes > 0 {
        writeln!(
            out,
            "\nplain TCP, {}: readable as it is",
            bytes(plain.bytes)
        )?;
        seen(out, &plain.statistics, &plain.first)?;
    }
    if directions.is_empty() {
        writeln!(out, "\nno datagrams of dibs")?;
    }
    directions.iter().try_for_each(|way| direction(out, way))
}

fn direction(out: &mut String, way: &Direction) -> fmt::Result {
    let lengths = way.lengths.iter();
    let lengths = lengths.map(|(length, number)| format!("{length} ({number})"));
    writeln!(
        out,
        "\n{} to {}, path {}, session {:08x}: {} with {} in {:.3} s",
        way.from,
        way.to,
        way.path,
        way.index,
        count(way.datagrams as usize, "datagram"),
        bytes(way.bytes),
        way.times.span,
    )?;
    writeln!(
        out,
        "in clear: lengths {}; longest silence {:.3} s; {} of the path's sequence numbers missing",
        lengths.collect::<Vec<_>>().join(", "),
        way.times.longest_silence,
        way.missing
    )?;
    seen(out, &way.statistics, &way.first)?;
    if way.untried > 0 {
        let untried = count(way.untried as usize, "datagram");
        writeln!(
            out,
            "{untried} skipped: after 40 without success, or 200 in all"
        )?;
    }
    if way.pieces.is_empty() {
        return writeln!(out, "recovered: nothing");
    }
    writeln!(
        out,
        "recovered: {} of text from {} of {}, {} of it certain",
        bytes(way.recovered),
        way.read,
        count(way.datagrams as usize, "datagram"),
        percent(way.certain as f64 / way.recovered as f64),
    )?;
    way.pieces.iter().try_for_each(|read| piece(out, read))
}

fn seen(out: &mut String, statistics: &Statistics, first: &[u8]) -> fmt::Result {
    let Statistics {
        printable,
        entropy,
        chi_square,
        repeated,
        ..
    } = statistics;
    writeln!(
        out,
        "seen: {} printable, {entropy:.2} bits a byte, chi-square {chi_square:.0} (random: 255), {} repeated",
        percent(*printable),
        percent(*repeated),
    )?;
    out.write_str(&hex(first, LINES))
}

fn piece(out: &mut String, piece: &Piece) -> fmt::Result {
    writeln!(
        out,
        "\n{} from number {} on, {}, {}:",
        count(piece.datagrams as usize, "datagram"),
        piece.first,
        kind(piece.kind),
        how(piece),
    )?;
    let printed = piece.bytes.len().min(PRINTED);
    out.write_str(&text(&piece.bytes[..printed], &piece.uncertain))?;
    match piece.bytes.len() - printed {
        0 => Ok(()),
        more => writeln!(out, "  and {} more: see --json", bytes(more as u64)),
    }
}

fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::English => "English",
        Kind::Http => "HTTP or HTML",
        Kind::Json => "JSON",
        Kind::Source => "source code",
        Kind::Database => "PostgreSQL's protocol",
    }
}

fn how(piece: &Piece) -> impl Display {
    match piece.how {
        How::Within => format!("by statistics, {:.1} bits a byte", piece.bits),
        How::Start => {
            "start of an epoch or standalone chunk, by its zeros and statistics".to_owned()
        }
        How::Known => "from the known file".to_owned(),
    }
}
