//! Parses the header `WWW-Authenticate` of a registry.

/// Authentication scheme that a registry requires.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Challenge {
    Basic,
    /// A token from the address `realm`, for the service and scope.
    Bearer {
        realm: String,
        service: Option<String>,
        scope: Option<String>,
    },
}

/// Returns the first supported challenge of the headers. Prefers a token over a password.
pub(crate) fn parse<'a>(headers: impl Iterator<Item = &'a str>) -> Option<Challenge> {
    let mut basic = None;
    for header in headers {
        for (scheme, parameters) in challenges(header) {
            if scheme.eq_ignore_ascii_case("bearer") {
                let value = |name: &str| {
                    let parameter = parameters.iter().find(|(key, _)| key == name);
                    parameter.map(|(_, value)| value.clone())
                };
                if let Some(realm) = value("realm") {
                    return Some(Challenge::Bearer {
                        realm,
                        service: value("service"),
                        scope: value("scope"),
                    });
                }
            } else if scheme.eq_ignore_ascii_case("basic") {
                basic = Some(Challenge::Basic);
            }
        }
    }
    basic
}

type Parameters = Vec<(String, String)>;

/// Splits a header into its challenges. Commas separate both challenges and their parameters.
fn challenges(header: &str) -> Vec<(String, Parameters)> {
    let mut challenges: Vec<(String, Parameters)> = Vec::new();
    let mut rest = header;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let end = rest.find([' ', '\t', ',', '=']).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        if word.is_empty() {
            // The end of the header, or invalid text.
            return challenges;
        }
        let value = after.trim_start_matches([' ', '\t']).strip_prefix('=');
        match (value, challenges.last_mut()) {
            (Some(value), Some((_, parameters))) => {
                let (value, next) = read_value(value.trim_start_matches([' ', '\t']));
                parameters.push((word.to_ascii_lowercase(), value));
                rest = next;
            }
            (Some(_), None) => return challenges,
            (None, _) => {
                challenges.push((word.to_owned(), Vec::new()));
                rest = after;
            }
        }
    }
}

/// Reads a token or a quoted text with backslash escapes. Returns it and the rest.
fn read_value(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([' ', '\t', ',']).unwrap_or(text.len());
        let (value, rest) = text.split_at(end);
        return (value.to_owned(), rest);
    };
    let mut value = String::new();
    let mut chars = quoted.chars();
    while let Some(c) = chars.next() {
        match c {
            '"' => break,
            '\\' => value.extend(chars.next()),
            c => value.push(c),
        }
    }
    (value, chars.as_str())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bearer(realm: &str, service: Option<&str>, scope: Option<&str>) -> Option<Challenge> {
        Some(Challenge::Bearer {
            realm: realm.to_owned(),
            service: service.map(ToOwned::to_owned),
            scope: scope.map(ToOwned::to_owned),
        })
    }

    #[test]
    fn registry_challenges_are_parsed() {
        let docker_hub = r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull,push""#;
        let docker_hub_challenge = bearer(
            "https://auth.docker.io/token",
            Some("registry.docker.io"),
            Some("repository:a/b:pull,push"),
        );
        for (headers, expected) in [
            (&[docker_hub][..], docker_hub_challenge),
            (&[r#"Basic realm="a registry""#], Some(Challenge::Basic)),
            (&["Basic"], Some(Challenge::Basic)),
            (
                &[r#"bearer realm="https://a/t""#],
                bearer("https://a/t", None, None),
            ),
            (
                &["Bearer realm=https://a/t"],
                bearer("https://a/t", None, None),
            ),
            (
                &[r#"Basic realm="a, b", Bearer service = "s\"x" , realm="https://a/t""#],
                bearer("https://a/t", Some("s\"x"), None),
            ),
            (
                &["Basic", r#"Bearer realm="https://a/t""#],
                bearer("https://a/t", None, None),
            ),
            (&["Bearer service=x"], None),
            (&["Negotiate"], None),
            (&["realm=x", "", ",,", "=", "\"", "Digest realm=\"x"], None),
        ] {
            assert_eq!(parse(headers.iter().copied()), expected, "{headers:?}");
        }
    }

    proptest! {
        #[test]
        fn any_header_is_read_to_its_end(header in "[a-zB =,\"\\\\\t]{0,60}") {
            drop(parse(std::iter::once(header.as_str())));
        }
    }
}
