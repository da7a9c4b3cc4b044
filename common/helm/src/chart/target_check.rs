//! Checks the targets of a repository's redirects, links and token realms: they must not be this machine or a
//! metadata service.

use std::net::IpAddr;
use std::time::Duration;

use krypton_types::kubeconfig::{Policy, refused_address};
use reqwest::Url;

const RESOLVE_DEADLINE: Duration = Duration::from_secs(5);

/// Returns why a repository at `from` must not lead to the address `to`. A repository that is itself at a refused
/// address may lead to others of the same kind.
pub(super) async fn target_refusal(from: &Url, to: &Url) -> Option<&'static str> {
    if from.host_str() == to.host_str() {
        return None;
    }
    let target_refusals = refusals(to).await;
    if target_refusals.is_empty() {
        return None;
    }
    let own_refusals = refusals(from).await;
    let is_refused = target_refusals
        .iter()
        .any(|reason| !own_refusals.contains(reason));
    is_refused.then_some("led to a loopback, link-local or metadata address")
}

/// Returns why the addresses of the URL's host are refused.
async fn refusals(url: &Url) -> Vec<&'static str> {
    let host = url.host_str().unwrap_or_default();
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let addresses = match host.parse::<IpAddr>() {
        Ok(address) => vec![address],
        Err(_) => resolve(host, url.port_or_known_default().unwrap_or_default()).await,
    };
    let policy = Policy::default();
    let addresses = addresses.into_iter();
    addresses
        .filter_map(|address| refused_address(address, &policy))
        .collect()
}

/// Returns no address if the name is unknown here: then a proxy resolves it, or the request fails.
async fn resolve(host: &str, port: u16) -> Vec<IpAddr> {
    let lookup = tokio::net::lookup_host((host, port));
    match tokio::time::timeout(RESOLVE_DEADLINE, lookup).await {
        Ok(Ok(addresses)) => addresses.map(|address| address.ip()).collect(),
        Ok(Err(_)) | Err(_) => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn repository_leads_to_no_address_of_this_machine() {
        for (from, to, is_refused) in [
            ("https://192.0.2.1", "https://192.0.2.2", false),
            ("https://192.0.2.1", "https://127.0.0.1:8082", true),
            ("https://192.0.2.1", "https://localhost/token", true),
            ("https://192.0.2.1", "https://169.254.169.254/latest", true),
            ("https://192.0.2.1", "https://[::ffff:127.0.0.1]/", true),
            ("https://192.0.2.1", "https://[64:ff9b:1::a9fe:a9fe]/", true),
            ("http://127.0.0.1:1", "http://127.0.0.1:2", false),
            ("http://127.0.0.1:1", "http://127.0.0.2:2", false),
            ("http://127.0.0.1:1", "http://169.254.169.254", true),
        ] {
            let [from_url, to_url] = [from, to].map(|url| url.parse().unwrap());
            let reason = target_refusal(&from_url, &to_url).await;
            assert_eq!(reason.is_some(), is_refused, "{from} {to}");
        }
    }
}
