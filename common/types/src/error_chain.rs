//! Formats an error with all its causes for users.

use std::error::Error;

/// Limit for the text in bytes. A parser's error may quote its whole input.
pub const MAX_LENGTH: usize = 4096;

/// Returns `error: cause: cause of the cause` on one line, cut at [`MAX_LENGTH`].
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    escape_and_cut(&text)
}

fn escape_and_cut(text: &str) -> String {
    const CUT: char = '…';
    let mut escaped = String::new();
    for c in text.chars() {
        let previous_len = escaped.len();
        match c.is_control() {
            true => escaped.extend(c.escape_debug()),
            false => escaped.push(c),
        }
        if escaped.len() > MAX_LENGTH - CUT.len_utf8() {
            escaped.truncate(previous_len);
            escaped.push(CUT);
            break;
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("writing failed")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn causes_follow_in_order() {
        let error = Outer(std::io::Error::other("disk full"));
        assert_eq!(chain(&error), "writing failed: disk full");
    }

    #[test]
    fn chain_is_bounded_and_has_no_control_characters() {
        let chain_of = |text: String| chain(&std::io::Error::other(text));
        assert_eq!(chain_of("a\nb\u{1b}".to_owned()), r"a\nb\u{1b}");
        let long = chain_of("ä\n".repeat(9_000));
        assert!(
            long.len() <= MAX_LENGTH && long.ends_with('…'),
            "{}",
            long.len()
        );
    }
}
