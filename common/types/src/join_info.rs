//! ConfigMap `krypton-hub-join` in the hub's namespace: what an agent needs to reach the hub, and the hub's version. With
//! it nobody has to read the Secret that holds the CA's key.

use std::collections::BTreeMap;

/// The ConfigMap's name.
pub const NAME: &str = "krypton-hub-join";
const CERTIFICATE_KEY: &str = "ca.crt";
const ADDRESSES_KEY: &str = "addresses";
const VERSION_KEY: &str = "version";

/// What is published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinInfo {
    /// PEM of the hub's roots.
    pub ca_pem: String,
    /// `host:port`, in the order in which they are to be tried.
    pub addresses: Vec<String>,
    /// The hub's, for people.
    pub version: String,
}

impl JoinInfo {
    /// What the ConfigMap's data says; what is missing is empty.
    pub fn of(data: &BTreeMap<String, String>) -> Self {
        let text = |key| data.get(key).map(String::as_str).unwrap_or_default();
        let addresses = text(ADDRESSES_KEY).lines().map(str::trim);
        Self {
            ca_pem: text(CERTIFICATE_KEY).to_owned(),
            addresses: addresses
                .filter(|address| !address.is_empty())
                .map(str::to_owned)
                .collect(),
            version: text(VERSION_KEY).to_owned(),
        }
    }

    /// What the ConfigMap's data is to say.
    pub fn data(&self) -> [(String, String); 3] {
        [
            (VERSION_KEY.to_owned(), self.version.clone()),
            (CERTIFICATE_KEY.to_owned(), self.ca_pem.clone()),
            (ADDRESSES_KEY.to_owned(), self.addresses.join("\n")),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn join_info_round_trips_through_published_data() {
        for addresses in [vec![], vec!["a:1".to_owned(), "[fd00::1]:2".to_owned()]] {
            let info = JoinInfo {
                ca_pem: "PEM\n".to_owned(),
                addresses,
                version: "1.2.3".to_owned(),
            };
            assert_eq!(JoinInfo::of(&info.data().into()), info);
        }
    }

    #[test]
    fn lines_that_say_nothing_are_no_addresses() {
        let data = [(ADDRESSES_KEY.to_owned(), "\n a:1 \r\n\n".to_owned())].into();
        assert_eq!(JoinInfo::of(&data).addresses, ["a:1"]);
        assert_eq!(
            JoinInfo::of(&BTreeMap::new()).addresses,
            Vec::<String>::new()
        );
    }
}
