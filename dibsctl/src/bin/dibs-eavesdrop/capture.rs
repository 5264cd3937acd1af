//! Capture files: pcap, with microseconds or nanoseconds, and pcapng.

use std::fs::File;
use std::io::{self, Read, Seek as _};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use dibs_eavesdrop::Link;
use pcap_file::pcap::PcapReader;
use pcap_file::pcapng::blocks::interface_description::InterfaceDescriptionOption;
use pcap_file::pcapng::{Block, PcapNgReader};
use pcap_file::{DataLink, PcapError};

/// How a pcapng file begins; all others are taken for pcap.
const PCAPNG: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];
/// Units of time in a second, of an interface that does not say (if_tsresol).
const MICROSECONDS: u64 = 1_000_000;

/// Gives each frame of a capture file to `take`, with when it passed. Returns a warning if the file ends too early.
///
/// # Errors
/// If it cannot be read, is no capture, or is broken otherwise.
pub(super) fn read(
    path: &Path,
    mut take: impl FnMut(Duration, Link, &[u8]),
) -> Result<Option<String>> {
    let name = path.display();
    let mut file = File::open(path).with_context(|| format!("cannot open {name}"))?;
    let mut magic = [0; 4];
    let begins = file.read_exact(&mut magic).and_then(|()| file.rewind());
    begins.map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => not_a_capture(path, "it has less than four bytes"),
        _ => anyhow!(error).context(format!("cannot read {name}")),
    })?;
    let mut frames = 0u64;
    let count = |at, link, frame: &[u8]| {
        frames += 1;
        take(at, link, frame);
    };
    let read = match magic == PCAPNG {
        true => pcapng(path, file, count),
        false => pcap(path, file, count),
    };
    match read {
        Ok(()) => Ok(None),
        Err(Stop::Said(error)) => Err(error),
        Err(Stop::At(PcapError::IoError(error)))
            if frames > 0 && error.kind() == io::ErrorKind::UnexpectedEof =>
        {
            Ok(Some(format!(
                "{name} ends within a packet: only the {frames} complete packet(s) before are shown"
            )))
        }
        Err(Stop::At(error)) => Err(anyhow!(
            "{name} is damaged after {frames} packets ({}): capture again, or cut it there",
            reason(&error)
        )),
    }
}

/// Why reading ended.
enum Stop {
    /// What is wrong with the file where it stands.
    At(PcapError),
    /// A whole sentence.
    Said(anyhow::Error),
}

impl From<PcapError> for Stop {
    fn from(error: PcapError) -> Self {
        Self::At(error)
    }
}

fn pcap(path: &Path, file: File, mut take: impl FnMut(Duration, Link, &[u8])) -> Result<(), Stop> {
    let mut reader =
        PcapReader::new(file).map_err(|error| Stop::Said(not_a_capture(path, &reason(&error))))?;
    let link = link(path, reader.header().datalink).map_err(Stop::Said)?;
    while let Some(packet) = reader.next_packet() {
        let packet = packet?;
        take(packet.timestamp, link, &packet.data);
    }
    Ok(())
}

fn pcapng(
    path: &Path,
    file: File,
    mut take: impl FnMut(Duration, Link, &[u8]),
) -> Result<(), Stop> {
    let mut reader = PcapNgReader::new(file)
        .map_err(|error| Stop::Said(not_a_capture(path, &reason(&error))))?;
    loop {
        let (interface, units, data) = match reader.next_block() {
            None => return Ok(()),
            Some(block) => match block? {
                // The library takes the units for nanoseconds, whatever the interface says.
                Block::EnhancedPacket(packet) => {
                    let units = packet.timestamp.as_nanos() as u64;
                    (packet.interface_id, units, packet.data.into_owned())
                }
                Block::Packet(packet) => {
                    let interface = u32::from(packet.interface_id);
                    (interface, packet.timestamp, packet.data.into_owned())
                }
                Block::SimplePacket(packet) => (0, 0, packet.data.into_owned()),
                _ => continue,
            },
        };
        let described = reader.interfaces().get(interface as usize);
        let described = described.ok_or(PcapError::InvalidInterfaceId(interface))?;
        let resolution = described.options.iter().find_map(|option| match option {
            InterfaceDescriptionOption::IfTsResol(code) => Some(per_second(*code)),
            _ => None,
        });
        let resolution = resolution.unwrap_or(Some(MICROSECONDS));
        let per_second = resolution.ok_or(PcapError::InvalidField("if_tsresol"))?;
        let link = link(path, described.linktype).map_err(Stop::Said)?;
        take(time(units, per_second), link, &data);
    }
}

/// What if_tsresol says: a negative power of ten, or with the highest bit of two.
fn per_second(code: u8) -> Option<u64> {
    match code & 0x80 {
        0 => 10u64.checked_pow(u32::from(code)),
        _ => 2u64.checked_pow(u32::from(code & 0x7f)),
    }
}

fn time(units: u64, per_second: u64) -> Duration {
    let rest = u128::from(units % per_second) * 1_000_000_000 / u128::from(per_second);
    Duration::new(units / per_second, rest as u32)
}

fn link(path: &Path, link: DataLink) -> Result<Link> {
    let number = u32::from(link);
    match Link::by_number(number) {
        Some(link) => Ok(link),
        None => bail!(
            "{} was captured on a link of the unknown kind {number}: capture on an Ethernet interface, or on one \
             that carries bare IP",
            path.display()
        ),
    }
}

fn not_a_capture(path: &Path, why: &str) -> anyhow::Error {
    anyhow!(
        "{} is no capture ({why}): use a pcap or pcapng file, as tcpdump -w writes it",
        path.display()
    )
}

/// In one sentence without what may come from the file.
fn reason(error: &PcapError) -> String {
    match error {
        PcapError::IoError(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            "it ends too early".to_owned()
        }
        PcapError::IoError(error) => error.to_string(),
        error => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    /// Two frames in each format; the second came a second and a half after the first.
    fn captures() -> [Vec<u8>; 2] {
        let pcap = [
            &[0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0][..],
            &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 1, 0, 0, 0],
            &[5, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 3, 0, 0, 0, 7, 8, 9],
            &[6, 0, 0, 0, 0x20, 0xa1, 7, 0, 2, 0, 0, 0, 2, 0, 0, 0, 1, 2],
        ];
        let block = |kind: u32, body: &[u8]| {
            let length = (12 + body.len() as u32).to_le_bytes();
            [&kind.to_le_bytes()[..], &length, body, &length].concat()
        };
        let mut section = vec![0x4d, 0x3c, 0x2b, 0x1a, 1, 0, 0, 0];
        section.extend([0xff; 8]);
        let packet = |micros: u32, data: [u8; 4], length: u32| {
            let numbers = [0, 0, micros, length, length];
            let numbers: Vec<u8> = numbers.iter().flat_map(|n: &u32| n.to_le_bytes()).collect();
            block(6, &[&numbers[..], &data].concat())
        };
        let pcapng = [
            block(0x0a0d_0d0a, &section),
            block(1, &[1, 0, 0, 0, 0, 0, 4, 0]),
            packet(5_000_000, [7, 8, 9, 0], 3),
            packet(6_500_000, [1, 2, 0, 0], 2),
        ];
        [pcap.concat(), pcapng.concat()]
    }

    type Frames = Vec<(Duration, Vec<u8>)>;

    fn read_bytes(bytes: &[u8]) -> Result<(Frames, Option<String>)> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("capture");
        std::fs::write(&path, bytes).unwrap();
        let mut frames = Vec::new();
        let cut = read(&path, |at, link, frame| {
            assert_eq!(link, Link::Ethernet);
            frames.push((at, frame.to_vec()));
        })?;
        Ok((frames, cut))
    }

    #[test]
    fn both_formats_give_frames_and_times() {
        for bytes in captures() {
            let (frames, cut) = read_bytes(&bytes).unwrap();
            let expected = [
                (Duration::from_secs(5), vec![7, 8, 9]),
                (Duration::from_millis(6500), vec![1, 2]),
            ];
            assert_eq!((frames.as_slice(), cut), (&expected[..], None));
        }
        assert_eq!(per_second(9), Some(1_000_000_000));
        assert_eq!(per_second(0x8a), Some(1024));
        assert_eq!(per_second(0xff), None);
        assert_eq!(time(1536, 1024), Duration::from_millis(1500));
    }

    #[test]
    fn a_file_that_ends_too_early_counts_as_far_as_it_goes() {
        for bytes in captures() {
            let (frames, cut) = read_bytes(&bytes[..bytes.len() - 1]).unwrap();
            assert_eq!(frames.len(), 1);
            let cut = cut.unwrap();
            assert!(cut.contains("only the 1 complete packet(s)"), "{cut}");
        }
    }

    #[test]
    fn what_is_no_capture_is_refused_in_a_sentence() {
        for bytes in [&b""[..], b"abc", b"abcd", &[0; 4096], &PCAPNG] {
            let error = format!("{:#}", read_bytes(bytes).unwrap_err());
            assert!(error.contains("is no capture"), "{error}");
            assert!(error.contains("tcpdump -w"), "{error}");
        }
        let mut other = captures()[0].clone();
        other[20] = 147;
        let error = read_bytes(&other).unwrap_err().to_string();
        assert!(error.contains("unknown kind 147"), "{error}");
    }

    /// Each byte set to each of a few values, and the file cut at each place.
    #[test]
    fn broken_captures_are_errors_or_less_and_never_panic() {
        for bytes in captures() {
            for at in 0..bytes.len() {
                let mut broken = bytes.clone();
                for value in [0, 1, 0x7f, 0xff] {
                    broken[at] = value;
                    let survives = catch_unwind(|| try_read(&broken));
                    assert!(survives.is_ok(), "byte {at} set to {value}");
                }
                assert!(
                    catch_unwind(|| try_read(&bytes[..at])).is_ok(),
                    "cut at {at}"
                );
            }
        }
    }

    fn try_read(bytes: &[u8]) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("capture");
        std::fs::write(&path, bytes).unwrap();
        let _ = read(&path, |_, _, _| ());
    }
}
