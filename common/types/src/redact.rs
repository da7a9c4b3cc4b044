//! Redacts likely secrets in text, and recognizes secret values by their names.

use crate::conditions::parse_condition_type;

/// Replacement for a secret.
pub const HIDDEN: &str = "[redacted]";

/// The result of [`url_shown`] for text that is not a URL.
pub const NO_URL: &str = "(not a URL)";

/// Redacts PEM blocks, credentials in URLs, likely tokens, and values after `Bearer`, `password:` and similar words.
pub fn redact(text: &str) -> String {
    redact_words(&redact_userinfo(&redact_pem(text)))
}

/// Returns a URL without user, password, query and fragment, each of which may contain a credential.
pub fn url_shown(text: &str) -> String {
    let without_query = text.split(['?', '#']).next().unwrap_or_default();
    let Some((scheme, rest)) = without_query.split_once("://") else {
        let host = without_query.rsplit('@').next().unwrap_or_default();
        return host.escape_debug().to_string();
    };
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host = authority.rsplit('@').next().unwrap_or_default();
    let port = host.rsplit_once(']').map_or(host, |(_, port)| port);
    let port = port.rsplit_once(':').map_or("", |(_, port)| port);
    // A password with a slash in it looks like a port.
    if !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return NO_URL.to_owned();
    }
    format!("{scheme}://{host}{path}")
        .escape_debug()
        .to_string()
}

/// Returns whether the authority of a URL contains a user or a password.
pub fn has_userinfo(url: &str) -> bool {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = rest.split(['/', '\\', '?', '#']).next().unwrap_or_default();
    authority.contains('@')
}

/// Returns whether the name denotes a secret. `password` and `clientSecret` do. `existingSecret` and `secretName`
/// only name objects.
pub fn is_secret_name(name: &str) -> bool {
    let name = normalized(name);
    let secret_words = [
        "password",
        "passwd",
        "passphrase",
        "secret",
        "token",
        "apikey",
        "accesskey",
        "privatekey",
        "credential",
    ];
    let reference_suffixes = ["name", "namespace", "ref", "keyref"];
    secret_words.iter().any(|word| name.contains(word))
        && !reference_suffixes.iter().any(|end| name.ends_with(end))
        && !names_object(&name)
}

/// Matches names such as `existingSecret` and `imagePullSecret`.
fn names_object(name: &str) -> bool {
    name.starts_with("existing") || name.contains("pullsecret")
}

/// In text, only names with such an ending count: `spec.tokenExpirationSeconds: Invalid value` must stay readable.
fn is_secret_word(word: &str) -> bool {
    let last = normalized(word.rsplit('.').next().unwrap_or_default());
    let ends = [
        "password",
        "passwd",
        "passphrase",
        "secret",
        "token",
        "apikey",
        "accesskey",
        "secretkey",
        "privatekey",
        "authorization",
    ];
    ends.iter().any(|end| last.ends_with(end)) && !names_object(&last)
}

fn normalized(name: &str) -> String {
    name.chars()
        .filter(char::is_ascii_alphanumeric)
        .map(|c| c.to_ascii_lowercase())
        .collect()
}

fn redact_pem(text: &str) -> String {
    let mut output = String::new();
    let mut rest = text;
    while let Some((before, block)) = rest.split_once("-----BEGIN ") {
        output.push_str(before);
        output.push_str(HIDDEN);
        // Without an end marker, all of the rest may belong to the block.
        rest = block.split_once("-----END ").map_or("", |(_, after)| {
            let ends = after.split_once("-----");
            // The end of this block is missing if the next block starts there.
            ends.filter(|(_, rest)| !rest.starts_with("BEGIN "))
                .map_or(after, |(_, rest)| rest)
        });
    }
    output + rest
}

fn redact_userinfo(text: &str) -> String {
    let mut output = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("://") {
        output.push_str(before);
        output.push_str("://");
        let end = after.find(|c: char| c == '/' || c == '"' || c.is_whitespace());
        let (authority, path) = after.split_at(end.unwrap_or(after.len()));
        match authority.rsplit_once('@') {
            Some((_, host)) => {
                output.push_str(HIDDEN);
                output.push('@');
                output.push_str(host);
            }
            None => output.push_str(authority),
        }
        rest = path;
    }
    output + rest
}

/// Redacts likely tokens, and values after `Bearer`, `password:` and similar words.
fn redact_words(text: &str) -> String {
    let is_word = |c: char| c.is_ascii_alphanumeric() || "+/_=.-~".contains(c);
    let mut output = String::with_capacity(text.len());
    let mut before = "";
    let mut rest = text;
    while !rest.is_empty() {
        let (gap, after) = rest.split_at(rest.find(is_word).unwrap_or(rest.len()));
        let end = after.find(|c| !is_word(c)).unwrap_or(after.len());
        let name = after.split_at(end).0.split('=').next().unwrap_or_default();
        let is_named_secret = is_secret_word(name);
        let (word, after) = after.split_at(if is_named_secret { name.len() } else { end });
        output.push_str(gap);
        output.push_str(if is_secret(before, gap, word) {
            HIDDEN
        } else {
            word
        });
        (before, rest) = (word, after);
        if is_secret_word(word)
            && let Some((sign, value, after)) = split_assignment(after)
        {
            output.push_str(sign);
            output.push_str(HIDDEN);
            (before, rest) = (value, after);
        }
    }
    output
}

/// Splits the text after a name into separator, value and rest. Returns `None` if there is no value, or if the API
/// server's verdict follows instead.
fn split_assignment(after: &str) -> Option<(&str, &str, &str)> {
    let unquoted = after.trim_start_matches(['"', '\'', '\\']);
    let in_json = unquoted.len() < after.len();
    let value = unquoted.trim_start_matches(' ');
    let value = value.strip_prefix([':', '='])?;
    let value = value.trim_start_matches([' ', ':', '=']);
    // Texts of the API server after a field's name that precede the rejected value.
    let prefixes = [
        "Invalid value: ",
        "Unsupported value: ",
        "Duplicate value: ",
    ];
    let quoted_value = prefixes.iter().find_map(|words| value.strip_prefix(words));
    let verdicts = [
        "Invalid",
        "Required",
        "Forbidden",
        "Unsupported",
        "Duplicate",
        "got ",
    ];
    if quoted_value.is_none() && verdicts.iter().any(|words| value.starts_with(words)) {
        return None;
    }
    let value = quoted_value.unwrap_or(value);
    let quote = ["\\\"", "\"", "'"]
        .into_iter()
        .find(|quote| value.starts_with(quote));
    let value = value.strip_prefix(quote.unwrap_or_default())?;
    let end = match quote {
        Some(quote) => closing_quote(value, quote),
        None => value.find(|c: char| c.is_whitespace() || in_json && ",}]".contains(c)),
    };
    let (value, rest) = value.split_at(end.unwrap_or(value.len()));
    let sign = after.get(..after.len() - value.len() - rest.len())?;
    (!value.is_empty()).then_some((sign, value, rest))
}

/// Returns the position of the closing quote.
fn closing_quote(text: &str, quote: &str) -> Option<usize> {
    let mut ends = text.match_indices(quote).map(|(at, _)| at);
    ends.find(|at| quote.len() > 1 || !text.split_at(*at).0.ends_with('\\'))
}

/// Returns whether `word` is a secret: it looks like a token, or it follows an authentication scheme or a flag for a
/// secret.
fn is_secret(before: &str, gap: &str, word: &str) -> bool {
    let is_separated = gap.trim().is_empty();
    let after_scheme = ["bearer", "basic"].contains(&before.to_ascii_lowercase().as_str());
    let after_flag = before.starts_with("--") && is_secret_word(before) && !word.starts_with("--");
    (is_separated && (after_scheme && word.len() >= 8 || after_flag && !word.is_empty()))
        || looks_like_token(word)
}

fn looks_like_token(word: &str) -> bool {
    // A condition type ends with the name of a cluster.
    let word = parse_condition_type(word).map_or(word, |(_, cluster)| cluster);
    let has = |kind: fn(&char) -> bool| word.chars().any(|c| kind(&c));
    let is_jwt = word.starts_with("eyJ") && word.len() >= 20;
    // Kubernetes names are lower case and digests are hexadecimal, so this rule redacts neither.
    let is_opaque = word.len() >= 32
        && !word.contains('.')
        && has(char::is_ascii_uppercase)
        && has(char::is_ascii_lowercase)
        && has(char::is_ascii_digit);
    is_jwt || is_opaque
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shown_url_holds_no_credential() {
        for (url, shown) in [
            ("https://a.org/c", "https://a.org/c"),
            (
                "https://a.org:8443/@scope/c/",
                "https://a.org:8443/@scope/c/",
            ),
            ("https://me:pw@a.org/c?key=1#x", "https://a.org/c"),
            ("https://me:p@w@[::1]:5/c", "https://[::1]:5/c"),
            ("oci://[::1]/c", "oci://[::1]/c"),
            ("https://me:p/w@a.org/c", NO_URL),
            ("https://me:p?w@a.org/c", NO_URL),
            ("me:pw@a.org/c?key=1", "a.org/c"),
            ("", ""),
        ] {
            assert_eq!(url_shown(url), shown, "{url}");
        }
        for (url, expected) in [
            ("https://me:pw@a.org", true),
            ("https://token@a.org/c", true),
            ("https://a.org/@scope/c?mail=a@b", false),
            ("https://a.org", false),
        ] {
            assert_eq!(has_userinfo(url), expected, "{url}");
        }
    }

    #[test]
    fn secret_value_is_redacted_whole_in_any_notation() {
        for (text, shown) in [
            (r#"password: "p@ssw0rd!x" a"#, r#"password: "[redacted]" a"#),
            (
                r#"password: "$ecret words" a"#,
                r#"password: "[redacted]" a"#,
            ),
            ("password: p@ss,w0rd!x a", "password: [redacted] a"),
            ("POSTGRES_PASSWORD=x a", "POSTGRES_PASSWORD=[redacted] a"),
            ("adminPassword: x a", "adminPassword: [redacted] a"),
            (
                r#"spec.password: Invalid value: "x y": no"#,
                r#"spec.password: Invalid value: "[redacted]": no"#,
            ),
            ("password: Required value", "password: Required value"),
            ("--token x --paused y", "--token [redacted] --paused y"),
            ("--token-file x", "--token-file x"),
            (r#"{"token":12,"a":"b"}"#, r#"{"token":[redacted],"a":"b"}"#),
            (
                r#"{\"token\":\"a b\",\"c\":1}"#,
                r#"{\"token\":\"[redacted]\",\"c\":1}"#,
            ),
            (r#"password="a \" b" c"#, r#"password="[redacted]" c"#),
            ("password='unended", "password='[redacted]"),
            ("password: ", "password: "),
            ("existingSecret: db-login", "existingSecret: db-login"),
            (
                "ClusterProgress/edge-eu-central-1-of-many",
                "ClusterProgress/edge-eu-central-1-of-many",
            ),
            ("Bearer abcdefgh12345678", "Bearer [redacted]"),
        ] {
            assert_eq!(redact(text), shown, "{text}");
        }
    }

    #[test]
    fn redaction_never_splits_multibyte_characters() {
        for text in [
            "password: ä",
            "\u{1F511}token=\u{1F511}",
            "secret:'\u{e9}'",
            "é://é@é",
        ] {
            assert!(!redact(text).is_empty());
        }
    }
}
