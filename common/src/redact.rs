//! Hides in running text what looks like a secret, and tells by their names which values are secrets.

/// What stands in the place of a secret.
pub const HIDDEN: &str = "[redacted]";

/// Hides PEM blocks, credentials in URLs, tokens by their looks, and what follows `Bearer`, `password:` and the like.
pub fn redact(text: &str) -> String {
    redact_words(&redact_userinfo(&redact_pem(text)))
}

/// `password` and `clientSecret` hold secrets; `existingSecret` and `secretName` only name objects.
pub fn is_secret_name(name: &str) -> bool {
    let name = normal(name);
    let holds = [
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
    let names = ["name", "namespace", "ref", "keyref"];
    holds.iter().any(|word| name.contains(word))
        && !names.iter().any(|end| name.ends_with(end))
        && !name.starts_with("existing")
        && !name.contains("pullsecret")
}

/// In running text only whole words count: `spec.tokenExpirationSeconds: Invalid value` is to stay.
fn is_secret_word(word: &str) -> bool {
    let last = word.rsplit('.').next().unwrap_or_default();
    let words = [
        "password",
        "passwd",
        "passphrase",
        "secret",
        "clientsecret",
        "token",
        "accesstoken",
        "apikey",
        "accesskey",
        "secretkey",
        "privatekey",
        "authorization",
    ];
    words.contains(&normal(last).as_str())
}

fn normal(name: &str) -> String {
    name.chars()
        .filter(char::is_ascii_alphanumeric)
        .map(|c| c.to_ascii_lowercase())
        .collect()
}

fn redact_pem(text: &str) -> String {
    let mut kept = String::new();
    let mut rest = text;
    while let Some((before, block)) = rest.split_once("-----BEGIN ") {
        kept.push_str(before);
        kept.push_str(HIDDEN);
        // Without its end, all that follows may be of it.
        rest = block.split_once("-----END ").map_or("", |(_, after)| {
            after.split_once("-----").map_or(after, |(_, after)| after)
        });
    }
    kept + rest
}

fn redact_userinfo(text: &str) -> String {
    let mut kept = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("://") {
        kept.push_str(before);
        kept.push_str("://");
        let end = after.find(|c: char| c == '/' || c == '"' || c.is_whitespace());
        let (authority, path) = after.split_at(end.unwrap_or(after.len()));
        match authority.rsplit_once('@') {
            Some((_, host)) => {
                kept.push_str(HIDDEN);
                kept.push('@');
                kept.push_str(host);
            }
            None => kept.push_str(authority),
        }
        rest = path;
    }
    kept + rest
}

/// Hides tokens by their looks, and what follows `Bearer`, `password:` and the like.
fn redact_words(text: &str) -> String {
    let is_word = |c: char| c.is_ascii_alphanumeric() || "+/_=.-~".contains(c);
    let mut kept = String::new();
    let mut last_word = String::new();
    let mut rest = text;
    while !rest.is_empty() {
        let gap_end = rest.find(is_word).unwrap_or(rest.len());
        let (gap, after) = rest.split_at(gap_end);
        let word_end = after.find(|c| !is_word(c)).unwrap_or(after.len());
        let (word, after) = after.split_at(word_end);
        kept.push_str(gap);
        kept.push_str(&shown(&last_word, gap, word));
        last_word = word.to_owned();
        rest = after;
    }
    kept
}

fn shown(before: &str, gap: &str, word: &str) -> String {
    let scheme = ["bearer", "basic"].contains(&before.to_ascii_lowercase().as_str());
    let assigned = is_secret_word(before)
        && gap.contains([':', '='])
        && gap.chars().all(|c| ":='\"\\ ".contains(c));
    // The apiserver's words after a field's name.
    let verdict = [
        "Invalid",
        "Required",
        "Forbidden",
        "Unsupported",
        "Duplicate",
        "got",
    ];
    if (scheme && gap.trim().is_empty() && word.len() >= 8)
        || (assigned && !verdict.contains(&word))
        || looks_like_token(word)
    {
        return HIDDEN.to_owned();
    }
    match word.split_once('=') {
        Some((name, value)) if is_secret_word(name) && !value.is_empty() => {
            format!("{name}={HIDDEN}")
        }
        _ => word.to_owned(),
    }
}

fn looks_like_token(word: &str) -> bool {
    let has = |kind: fn(&char) -> bool| word.chars().any(|c| kind(&c));
    let jwt = word.starts_with("eyJ") && word.len() >= 20;
    // Names in Kubernetes are lower case and digests are hex, so neither is hidden.
    let opaque = word.len() >= 32
        && !word.contains('.')
        && has(char::is_ascii_uppercase)
        && has(char::is_ascii_lowercase)
        && has(char::is_ascii_digit);
    jwt || opaque
}
