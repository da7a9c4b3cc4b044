//! ConfigMap `krypton-hub-join` in the hub's namespace: the data that an agent needs to reach the hub, and the hub's
//! version. Because of it, clients need no access to the Secret with the CA's key.

use std::collections::BTreeMap;

/// The ConfigMap's name.
pub const NAME: &str = "krypton-hub-join";
const CERTIFICATE_KEY: &str = "ca.crt";
const ADDRESSES_KEY: &str = "addresses";
const VERSION_KEY: &str = "version";

/// Data of the ConfigMap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinInfo {
    /// PEM of the hub's roots.
    pub ca_pem: String,
    /// `host:port`, in the order in which agents try them.
    pub addresses: Vec<String>,
    /// Version of the hub, for users.
    pub version: String,
}

impl JoinInfo {
    /// Reads the ConfigMap's data. Missing entries become empty.
    pub fn from_data(data: &BTreeMap<String, String>) -> Self {
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

    /// Returns the ConfigMap's data.
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
            assert_eq!(JoinInfo::from_data(&info.data().into()), info);
        }
    }

    #[test]
    fn blank_lines_are_not_addresses() {
        let data = [(ADDRESSES_KEY.to_owned(), "\n a:1 \r\n\n".to_owned())].into();
        assert_eq!(JoinInfo::from_data(&data).addresses, ["a:1"]);
        assert_eq!(
            JoinInfo::from_data(&BTreeMap::new()).addresses,
            Vec::<String>::new()
        );
    }
}
