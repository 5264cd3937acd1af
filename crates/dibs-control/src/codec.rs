//! Lines to values and back.

use serde::{Deserialize, Serialize};

use crate::{ErrorKind, Failure, Reply, Request};

/// Version of this protocol; each request names it.
pub const VERSION: u32 = 1;

/// Bytes that a request's line may have.
pub const MAX_REQUEST: usize = 16 * 1024;

/// Bytes that a reply's line may have: some tens of thousands of connections.
pub const MAX_REPLY: usize = 32 * 1024 * 1024;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope<R> {
    version: u32,
    request: R,
}

/// The version alone, readable whatever else a later version says.
#[derive(Deserialize)]
struct Head {
    version: u32,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Answer<'a> {
    Ok(&'a Reply),
    Error(&'a Failure),
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum OwnedAnswer {
    Ok(Box<Reply>),
    Error(Failure),
}

/// The line for a request, with its end.
pub fn encode_request(request: &Request) -> String {
    line(&Envelope {
        version: VERSION,
        request,
    })
}

/// The request in a line, or the error to answer it with.
pub fn decode_request(line: &str) -> Result<Request, Failure> {
    let bad = |error: serde_json::Error| {
        Failure::new(
            ErrorKind::BadRequest,
            format!("this is not a request: {error}"),
        )
    };
    let Head { version } = serde_json::from_str(line).map_err(bad)?;
    if version != VERSION {
        return Err(Failure::new(
            ErrorKind::Version,
            format!(
                "the client speaks version {version} of the control protocol and this dibsd \
                 version {VERSION}; use the dibsctl that came with it"
            ),
        ));
    }
    let envelope: Envelope<Request> = serde_json::from_str(line).map_err(bad)?;
    envelope.request.check()?;
    Ok(envelope.request)
}

/// The line for an answer, with its end.
pub fn encode_reply(answer: &Result<Reply, Failure>) -> String {
    line(&match answer {
        Ok(reply) => Answer::Ok(reply),
        Err(failure) => Answer::Error(failure),
    })
}

/// The answer in a line; the outer error: it is none.
pub fn decode_reply(line: &str) -> Result<Result<Reply, Failure>, serde_json::Error> {
    Ok(match serde_json::from_str(line)? {
        OwnedAnswer::Ok(reply) => Ok(*reply),
        OwnedAnswer::Error(failure) => Err(failure),
    })
}

fn line(value: &impl Serialize) -> String {
    let mut line = serde_json::to_string(value).expect("our types have string keys only");
    line.push('\n');
    line
}

/// Collects what comes in pieces, and hands it out by lines of bounded length.
#[derive(Debug)]
pub struct LineBuffer {
    bytes: Vec<u8>,
    /// Up to here there is no end of a line.
    searched: usize,
    limit: usize,
}

/// The other side sent more than a line may have, or what is no text; it cannot be understood
/// from here on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a line of more than {0} bytes, or not of text")]
pub struct LineError(usize);

impl LineBuffer {
    /// For lines of at most `limit` bytes, their ends not counted.
    pub fn new(limit: usize) -> Self {
        LineBuffer {
            bytes: Vec::new(),
            searched: 0,
            limit,
        }
    }

    /// Takes what came. Hand out the lines before taking more: what is held is then bounded by
    /// the limit and one piece.
    pub fn extend(&mut self, piece: &[u8]) {
        self.bytes.extend_from_slice(piece);
    }

    /// The next line without its end; none: more has to come first.
    pub fn next_line(&mut self) -> Result<Option<String>, LineError> {
        let end = self.bytes[self.searched..]
            .iter()
            .position(|byte| *byte == b'\n');
        let Some(length) = end.map(|end| self.searched + end) else {
            self.searched = self.bytes.len();
            return if self.searched > self.limit {
                Err(LineError(self.limit))
            } else {
                Ok(None)
            };
        };
        if length > self.limit {
            return Err(LineError(self.limit));
        }
        let mut line: Vec<u8> = self.bytes.drain(..=length).collect();
        line.truncate(length);
        self.searched = 0;
        String::from_utf8(line)
            .map(Some)
            .map_err(|_| LineError(self.limit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limit, Match, NewRule, PathChange, Selector};

    #[test]
    fn requests_have_these_lines() {
        let selector = Selector::Match(Match {
            dport: Some(80),
            ..Match::default()
        });
        for (request, line) in [
            (Request::Status, r#"{"version":1,"request":"status"}"#),
            (Request::ConnList, r#"{"version":1,"request":"conn_list"}"#),
            (
                Request::Enable {
                    selector: selector.clone(),
                    bump: None,
                },
                r#"{"version":1,"request":{"enable":{"selector":{"match":{"dport":80}},"bump":null}}}"#,
            ),
            (
                Request::Disable {
                    selector: Selector::Conn(3),
                    force: false,
                },
                r#"{"version":1,"request":{"disable":{"selector":{"conn":3}}}}"#,
            ),
            (
                Request::Disable {
                    selector: Selector::Conn(3),
                    force: true,
                },
                r#"{"version":1,"request":{"disable":{"selector":{"conn":3},"force":true}}}"#,
            ),
            (
                Request::ForceCleanup,
                r#"{"version":1,"request":"force_cleanup"}"#,
            ),
            (
                Request::RuleAdd(NewRule {
                    require: true,
                    ..NewRule::new(Selector::All, "scramble")
                }),
                r#"{"version":1,"request":{"rule_add":{"selector":"all","bump":"scramble","require":true}}}"#,
            ),
            (
                Request::RuleAdd(NewRule {
                    terms: [("time", "08:00-18:00"), ("match", "-m tos --tos 8")]
                        .map(|(key, text)| (key, text.to_owned()))
                        .into_iter()
                        .collect(),
                    prefer: true,
                    priority: -1,
                    ..NewRule::new(Selector::All, "seal")
                }),
                r#"{"version":1,"request":{"rule_add":{"selector":"all","terms":{"time":"08:00-18:00","match":"-m tos --tos 8"},"bump":"seal","require":false,"prefer":true,"priority":-1}}}"#,
            ),
            (
                Request::RuleAdd(NewRule {
                    scheduler: Some("redundant".to_owned()),
                    ..NewRule::new(selector.clone(), "seal")
                }),
                r#"{"version":1,"request":{"rule_add":{"selector":{"match":{"dport":80}},"bump":"seal","require":false,"scheduler":"redundant"}}}"#,
            ),
            (
                Request::RuleDel {
                    id: 9,
                    force: false,
                },
                r#"{"version":1,"request":{"rule_del":{"id":9}}}"#,
            ),
            (
                Request::RuleDel { id: 9, force: true },
                r#"{"version":1,"request":{"rule_del":{"id":9,"force":true}}}"#,
            ),
            (
                Request::PathChange(PathChange::Prefer {
                    path: "wlan".to_owned(),
                    weight: None,
                    delta: Some(2.5),
                }),
                r#"{"version":1,"request":{"path_change":{"prefer":{"path":"wlan","weight":null,"delta":2.5}}}}"#,
            ),
            (
                Request::PathChange(PathChange::Limit {
                    path: "wlan".to_owned(),
                    rate: Some(Limit::At(20_000_000)),
                    volume: Some(Limit::None),
                }),
                r#"{"version":1,"request":{"path_change":{"limit":{"path":"wlan","rate":{"at":20000000},"volume":"none"}}}}"#,
            ),
            (
                Request::PathChange(PathChange::Reset),
                r#"{"version":1,"request":{"path_change":"reset"}}"#,
            ),
            (
                Request::PathPreferences,
                r#"{"version":1,"request":"path_preferences"}"#,
            ),
            (Request::Events, r#"{"version":1,"request":"events"}"#),
        ] {
            assert_eq!(encode_request(&request), format!("{line}\n"));
            assert_eq!(decode_request(line), Ok(request));
        }
    }

    #[test]
    fn other_lines_are_refused_by_kind() {
        let kind = |line: &str| decode_request(line).unwrap_err().kind;
        assert_eq!(
            kind(r#"{"version":2,"request":{"dance":{}},"more":1}"#),
            ErrorKind::Version
        );
        for line in [
            "",
            "status",
            "[]",
            r#"{"request":"status"}"#,
            r#"{"version":1}"#,
            r#"{"version":-1,"request":"status"}"#,
            r#"{"version":1,"request":"dance"}"#,
            r#"{"version":1,"request":"status","more":1}"#,
            r#"{"version":1,"request":{"rule_del":{"id":-1}}}"#,
            r#"{"version":1,"request":{"rule_del":{"id":1,"more":true}}}"#,
            r#"{"version":1,"request":{"disable":{"selector":{"match":{}}}}}"#,
            r#"{"version":1,"request":{"disable":{"selector":{"match":{"dprot":80}}}}}"#,
            r#"{"version":1,"request":{"disable":{"selector":{"match":{"dst":"10.0.0.0/33"}}}}}"#,
            r#"{"version":1,"request":{"rule_add":{"selector":{"conn":1},"bump":"seal"}}}"#,
            r#"{"version":1,"request":{"path_change":{"limit":{"path":"wlan"}}}}"#,
            r#"{"version":1,"request":{"path_change":{"prefer":{"path":"wlan","much":true}}}}"#,
            r#"{"version":1,"request":{"rule_add":{"selector":{"match":{"pid":1}},"bump":"seal"}}}"#,
            r#"{"version":1,"request":{"rule_add":{"selector":{"match":{"uid":1}},"bump":"seal","scheduler":"blest"}}}"#,
            r#"{"version":1,"request":{"rule_add":{"selector":"all","terms":{"gid":1},"bump":"seal","scheduler":"blest"}}}"#,
        ] {
            assert_eq!(kind(line), ErrorKind::BadRequest, "{line}");
        }
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(kind(&deep), ErrorKind::BadRequest);
    }

    #[test]
    fn answers_stay_on_their_line() {
        assert_eq!(encode_reply(&Ok(Reply::Done)), "{\"ok\":\"done\"}\n");
        let failure = Failure::new(ErrorKind::NoSession, "two\nlines");
        let line = encode_reply(&Err(failure.clone()));
        assert_eq!(
            line,
            "{\"error\":{\"kind\":\"no_session\",\"message\":\"two\\nlines\"}}\n"
        );
        assert_eq!(decode_reply(&line).unwrap(), Err(failure));
        let later = r#"{"error":{"kind":"moonphase","message":"m","more":1}}"#;
        assert_eq!(
            decode_reply(later).unwrap().unwrap_err().kind,
            ErrorKind::Other
        );
        assert!(decode_reply("{}").is_err() && decode_reply("HTTP/1.1 400").is_err());
    }

    #[test]
    fn lines_come_whole_however_they_arrive() {
        let text = "first\n\nthird is longer\n";
        for size in 1..=text.len() {
            let mut buffer = LineBuffer::new(20);
            let mut lines = Vec::new();
            for piece in text.as_bytes().chunks(size) {
                buffer.extend(piece);
                while let Some(line) = buffer.next_line().unwrap() {
                    lines.push(line);
                }
            }
            assert_eq!(lines, ["first", "", "third is longer"], "pieces of {size}");
        }
    }

    #[test]
    fn lines_are_bounded_text() {
        for (bytes, good) in [("aaaa\n", true), ("aaaaa\n", false), ("aaaaa", false)] {
            let mut buffer = LineBuffer::new(4);
            buffer.extend(bytes.as_bytes());
            assert_eq!(buffer.next_line().is_ok(), good, "{bytes:?}");
        }
        let mut buffer = LineBuffer::new(4);
        buffer.extend(b"\xff\n");
        assert_eq!(buffer.next_line(), Err(LineError(4)));
    }
}
