//! Listen addresses in Go's notation: `:8080`, `127.0.0.1:8080`, `[::1]:8080`.

use std::fmt;
use std::str::FromStr;

/// A listen address. Without a host, it stands for all addresses of all available IP versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindAddress {
    /// Host name or IP address without brackets.
    pub host: Option<String>,
    /// 0 lets the system choose.
    pub port: u16,
}

/// The text is not a listen address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a listen address like :8080 or 127.0.0.1:8080")]
pub struct InvalidBindAddress;

impl FromStr for BindAddress {
    type Err = InvalidBindAddress;

    fn from_str(text: &str) -> Result<Self, InvalidBindAddress> {
        let (host, port) = text.rsplit_once(':').ok_or(InvalidBindAddress)?;
        if port.is_empty() || !port.bytes().all(|b| b.is_ascii_digit()) {
            return Err(InvalidBindAddress);
        }
        let port = port.parse().map_err(|_| InvalidBindAddress)?;
        let host = match host.strip_prefix('[') {
            Some(bracketed) => {
                let inner = bracketed.strip_suffix(']').ok_or(InvalidBindAddress)?;
                inner
                    .parse::<std::net::Ipv6Addr>()
                    .map_err(|_| InvalidBindAddress)?;
                Some(inner.to_owned())
            }
            None if host.is_empty() => None,
            None => {
                let is_valid_char = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-';
                if !host.chars().all(is_valid_char) {
                    return Err(InvalidBindAddress);
                }
                Some(host.to_owned())
            }
        };
        Ok(Self { host, port })
    }
}

impl fmt::Display for BindAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            None => write!(f, ":{}", self.port),
            Some(host) if host.contains(':') => write!(f, "[{host}]:{}", self.port),
            Some(host) => write!(f, "{host}:{}", self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn go_forms_are_read_and_written_back() {
        let cases = [
            (":8080", None, 8080),
            ("127.0.0.1:9090", Some("127.0.0.1"), 9090),
            ("localhost:0", Some("localhost"), 0),
            ("[::1]:8081", Some("::1"), 8081),
        ];
        for (text, host, port) in cases {
            let address: BindAddress = text.parse().unwrap();
            assert_eq!(
                address,
                BindAddress {
                    host: host.map(str::to_owned),
                    port
                },
                "{text}"
            );
            assert_eq!(address.to_string(), text);
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "8080",
            ":",
            ":x",
            ":+1",
            ":65536",
            "a b:1",
            "::1:80",
            "[::1:80",
            "[x]:80",
            "http://h:80",
        ] {
            assert_eq!(
                text.parse::<BindAddress>(),
                Err(InvalidBindAddress),
                "{text:?}"
            );
        }
    }
}
