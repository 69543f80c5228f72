//! Errors of the server and of the client, mapped to codes.

use everbus_core::{Code, Error};
use redis::{ErrorKind, RedisError};

/// The hint for a connection with TLS that cannot be made. A server without TLS may close the connection, send
/// something else, or never answer.
pub(crate) const TLS_HINT: &str = "is the server running, with TLS on this port (rediss://), and did an authority of \
    this machine or of broker.tls sign its certificate?";

/// Maps an error of the server by the first word of its text. `None` if the connection failed instead.
pub(crate) fn of_server(server: &str, error: &RedisError) -> Option<Error> {
    let word = match error.kind() {
        ErrorKind::AuthenticationFailed => "WRONGPASS".to_owned(),
        ErrorKind::Server(_) | ErrorKind::Extension => error.code()?.to_owned(),
        ErrorKind::InvalidClientConfig | ErrorKind::RESP3NotSupported => "CONFIG".to_owned(),
        _ => return None,
    };
    let detail = error.detail().unwrap_or_default();
    Some(of_word(server, &word, detail))
}

/// The error for a refusal of the server.
pub(crate) fn of_word(server: &str, word: &str, detail: &str) -> Error {
    let what = |text: &str| format!("{server}: {text}");
    let new = |code: Code, text: &str, hint: &str| Error::new(code, what(text)).hint(hint);
    match word {
        "LOADING" => new(
            Code::Unavailable,
            "the server is loading its data",
            "it answers when it is done: the bus goes on by itself",
        ),
        "READONLY" => new(
            Code::ReadOnly,
            "the server is a replica, which takes no events",
            "name the primary in the URL; after a failover that is another server",
        ),
        "OOM" => new(
            Code::DiskFull,
            "the memory of the server is full: it takes no more events",
            "raise maxmemory, let consumers catch up, or give streams a max_len; acks and dead letters still go \
             through",
        ),
        "MISCONF" => new(
            Code::DiskFull,
            "the server cannot save to its disk and takes no writes",
            "look at the disk and the log of the server",
        ),
        "NOREPLICAS" => new(
            Code::Unavailable,
            "the server has fewer replicas than min-replicas-to-write asks for",
            "bring the replicas back; the bus goes on by itself",
        ),
        "MASTERDOWN" => new(
            Code::Unavailable,
            "the replica has lost its primary",
            "name the primary in the URL",
        ),
        "BUSY" => new(
            Code::Busy,
            "a script of another client keeps the server busy",
            "see the slow log of the server; SCRIPT KILL ends a script that has written nothing",
        ),
        "NOAUTH" | "WRONGPASS" => new(
            Code::InvalidSetting,
            "the server refuses these credentials",
            "put user and password into the URL (redis://user:password@host), or set broker.user and \
             broker.password",
        ),
        "NOPERM" => new(
            Code::InvalidSetting,
            &format!("this user has no permission: {detail}"),
            "the user needs the keys of its streams, everbus:* and dlq:*, and the commands @stream, @hash, \
             @sortedset, @set, @string and @scripting",
        ),
        "WRONGTYPE" => wrong_type(server, detail),
        "AHEAD" => new(
            Code::InvalidSetting,
            &format!("a stream has an id far in the future, and takes no more events: {detail}"),
            "another program wrote that id: delete the entry, and set the last id of the stream (XSETID)",
        ),
        "MOVED" | "ASK" | "CROSSSLOT" | "CLUSTERDOWN" => new(
            Code::Unsupported,
            "the server is part of a cluster, which this engine does not support",
            "use a single primary, with replicas if you need them",
        ),
        "CONFIG" => new(
            Code::InvalidSetting,
            &format!("the connection cannot be made: {detail}"),
            "check scheme, TLS and certificates; rediss:// is for servers with TLS",
        ),
        "ERR"
            if detail.contains("ACL failure") || detail.contains("executing the script can't") =>
        {
            of_word(server, "NOPERM", detail)
        }
        "ERR" if detail.contains("max number of clients") => new(
            Code::Unavailable,
            "the server has as many clients as it takes",
            "raise maxclients, or close other clients",
        ),
        "ERR" if detail.contains("without any password") => new(
            Code::InvalidSetting,
            "a password is given, and the server has none",
            "remove the password from the URL",
        ),
        "ERR" if detail.contains("DB index") => new(
            Code::InvalidUrl,
            "the server has no database of this number",
            "name another number after the host, or raise databases on the server",
        ),
        "ERR" if detail.contains("unknown command") || detail.contains("unknown subcommand") => {
            new(
                Code::Unsupported,
                &format!("the server lacks a command: {detail}"),
                "use Redis 7.0 or newer, or Valkey",
            )
        }
        word => Error::new(Code::Internal, what(&format!("{word} {detail}"))),
    }
}

/// The error for a refusal in the words of the server: `OOM command not allowed …`.
pub(crate) fn of_text(server: &str, text: &str) -> Error {
    let text = text.trim_start_matches('-');
    let (word, detail) = text.split_once(' ').unwrap_or((text, ""));
    of_word(server, word, detail)
}

/// The error for a key that has the name of a stream and another type.
pub(crate) fn wrong_type(server: &str, key: &str) -> Error {
    let text = format!("{server}: the key {key:?} is not a stream");
    Error::new(Code::InvalidSetting, text).hint(
        "rename the other key, or separate the bus by a space in the URL (redis://host/0/space)",
    )
}

/// The error for a broken connection or a request without an answer. `sent`: the request may have taken effect.
pub(crate) fn away(server: &str, what: &str, sent: bool) -> Error {
    let error = Error::new(Code::Unavailable, format!("{server}: {what}"))
        .hint("is the server running? The bus goes on by itself once it is there again");
    match sent {
        true => error.with_unknown_outcome(),
        false => error,
    }
}

/// The error for an answer with an unexpected form.
pub(crate) fn unreadable(what: &str) -> Error {
    let text = format!("the answer of the server cannot be read: {what}");
    Error::new(Code::Internal, text).with_unknown_outcome()
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: contract/redis-refusals: each refusal of the server that an operator can meet has a code and a hint
    #[test]
    fn each_refusal_has_a_code_and_a_hint() {
        for (text, code) in [
            (
                "LOADING Redis is loading the dataset in memory",
                Code::Unavailable,
            ),
            (
                "READONLY You can't write against a read only replica.",
                Code::ReadOnly,
            ),
            (
                "OOM command not allowed when used memory > 'maxmemory'.",
                Code::DiskFull,
            ),
            (
                "MISCONF Redis is configured to save RDB snapshots",
                Code::DiskFull,
            ),
            (
                "NOREPLICAS Not enough good replicas to write.",
                Code::Unavailable,
            ),
            ("BUSY Redis is busy running a script.", Code::Busy),
            ("NOAUTH Authentication required.", Code::InvalidSetting),
            ("NOPERM User low has no permissions", Code::InvalidSetting),
            ("MOVED 3999 127.0.0.1:6381", Code::Unsupported),
            ("CLUSTERDOWN The cluster is down", Code::Unsupported),
            ("ERR max number of clients reached", Code::Unavailable),
            ("ERR DB index is out of range", Code::InvalidUrl),
            ("ERR unknown command 'XADD'", Code::Unsupported),
        ] {
            for text in [text.to_owned(), format!("-{text}")] {
                let error = of_text("one:6379", &text);
                assert_eq!(error.code(), code, "{error}");
                assert!(error.message().starts_with("one:6379: "), "{error}");
                assert!(error.hint_text().is_some(), "{error}");
            }
        }
    }
}
