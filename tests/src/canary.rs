//! Finds secrets outside their intended places, in every encoding that a leak could use.

use base64::{
    Engine,
    prelude::{BASE64_STANDARD, BASE64_STANDARD_NO_PAD, BASE64_URL_SAFE_NO_PAD},
};

/// Range of the private scalar in a P-256 key in PKCS#8.
const SCALAR: std::ops::Range<usize> = 36..68;
/// Shorter matches could be coincidences.
const MIN_MATCH: usize = 12;
/// Number of bytes that are shown on either side of a match.
const EXCERPT: usize = 200;

/// A secret and the encodings in which it could leak.
#[derive(Debug, Clone)]
pub struct Canary {
    name: String,
    /// Encodings of the secret. All are ASCII.
    encodings: Vec<String>,
}

impl Canary {
    /// Creates a canary from a text, such as a token or a value.
    pub fn text(name: &str, secret: &str) -> Self {
        let mut canary = Self {
            name: name.to_owned(),
            encodings: vec![secret.to_owned()],
        };
        canary.add_encodings(secret.as_bytes());
        canary
    }

    /// Creates a canary from a private key in PEM. Only the scalar counts, because the start and end of the encoding
    /// are public or the same for all keys.
    ///
    /// # Panics
    /// Panics if the key is not a P-256 key in PKCS#8.
    pub fn key(name: &str, pem: &str) -> Self {
        let lines: Vec<&str> = pem.lines().filter(|line| !line.contains("--")).collect();
        let der = BASE64_STANDARD.decode(lines.concat());
        let der = der.unwrap_or_else(|error| panic!("{name} is not PEM: {error}"));
        let scalar = der.get(SCALAR);
        let scalar = scalar.unwrap_or_else(|| panic!("{name} is not a P-256 key"));
        let mut canary = Self {
            name: name.to_owned(),
            encodings: Vec::new(),
        };
        canary.add_encodings(scalar);
        // This line contains most of the key, as it appears in the file and in quotations of the file.
        let second_line = lines.get(1);
        let second_line = second_line.unwrap_or_else(|| panic!("{name} is not a P-256 key"));
        canary.encodings.push((*second_line).to_owned());
        canary.add_encodings(second_line.as_bytes());
        canary
    }

    /// Adds the encodings of bytes: base64, hex, a list of numbers, and escaped.
    fn add_encodings(&mut self, secret: &[u8]) {
        for skip in 0..3 {
            // The base64 encoding depends on the offset modulo three. Its ends depend on the neighboring bytes.
            let part = secret.get(skip..).unwrap_or_default();
            let part = part.get(..part.len() / 3 * 3).unwrap_or_default();
            if part.len() >= MIN_MATCH {
                self.encodings.extend([
                    BASE64_STANDARD_NO_PAD.encode(part),
                    BASE64_URL_SAFE_NO_PAD.encode(part),
                ]);
            }
        }
        let hex: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
        let list = format!("{secret:?}");
        self.encodings.extend([
            hex.to_uppercase(),
            hex,
            list.trim_matches(['[', ']']).to_owned(),
            list.trim_matches(['[', ']']).replace(' ', ""),
            secret.escape_ascii().to_string(),
        ]);
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the text around the first match, if any.
    pub fn find_in(&self, content: &[u8]) -> Option<String> {
        self.find_in_text(&String::from_utf8_lossy(content))
    }

    fn find_in_text(&self, content: &str) -> Option<String> {
        self.encodings.iter().find_map(|encoding| {
            let start = content.find(encoding)?;
            let end = content.len().min(start + encoding.len() + EXCERPT);
            let excerpt = content.as_bytes().get(start.saturating_sub(EXCERPT)..end);
            Some(String::from_utf8_lossy(excerpt.unwrap_or_default()).into_owned())
        })
    }
}

/// Returns all matches of these secrets in these places, each with its name and the surrounding text.
pub fn search<'a>(
    canaries: &[Canary],
    locations: impl IntoIterator<Item = (&'a str, &'a [u8])>,
) -> Vec<String> {
    let mut matches = Vec::new();
    for (location, content) in locations {
        let content = String::from_utf8_lossy(content);
        for canary in canaries {
            if let Some(excerpt) = canary.find_in_text(&content) {
                matches.push(format!("{} is in {location}: …{excerpt}…", canary.name));
            }
        }
    }
    matches
}

#[cfg(test)]
mod tests {
    use rcgen::KeyPair;

    use super::*;

    fn log_line(text: &[u8]) -> Vec<u8> {
        [b"a line of a log, msg=\"", text, b"\" and more\n"].concat()
    }

    #[test]
    fn planted_secret_is_found_in_every_form() {
        let (key, other) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
        let (pem, der) = (key.serialize_pem(), key.serialize_der());
        let inner = pem.lines().nth(2).unwrap();
        let canaries = [
            Canary::key("the key", &pem),
            Canary::text("the token", "b7a1-not-to-be-seen"),
        ];
        let planted = [
            pem.clone().into_bytes(),
            inner.as_bytes().to_vec(),
            BASE64_STANDARD.encode(&pem).into_bytes(),
            BASE64_STANDARD.encode(format!("x{pem}")).into_bytes(),
            format!("{:?}", pem.as_bytes()).into_bytes(),
            format!("{der:?}").into_bytes(),
            der.iter()
                .map(|byte| format!("{byte:02x}"))
                .collect::<String>()
                .into_bytes(),
            der.escape_ascii().to_string().into_bytes(),
            b"token=b7a1-not-to-be-seen".to_vec(),
            BASE64_STANDARD
                .encode("user: b7a1-not-to-be-seen")
                .into_bytes(),
        ];
        for secret in planted {
            let content = log_line(&secret);
            let matches = search(&canaries, [("a log", content.as_slice())]);
            assert_eq!(matches.len(), 1, "{}", String::from_utf8_lossy(&content));
            assert!(matches[0].contains("is in a log"));
        }
        // Public parts and keys of other owners don't match.
        let others = [
            other.serialize_pem(),
            key.public_key_pem(),
            "b7a1".to_owned(),
        ];
        for other in others {
            let content = log_line(other.as_bytes());
            assert_eq!(search(&canaries, [("a log", content.as_slice())]), [""; 0]);
        }
    }
}
