//! Judges where a repository leads by redirects, links and token realms: not to this machine, nor to metadata.

use std::net::IpAddr;
use std::time::Duration;

use krypton_types::kubeconfig::{Policy, refused_address};
use reqwest::Url;

const RESOLVE_DEADLINE: Duration = Duration::from_secs(5);

/// Returns the problem with an address that a response of `from` names. A repository that is itself at such an
/// address may lead to others of the same kind.
pub(super) async fn leads_astray(from: &Url, to: &Url) -> Option<&'static str> {
    if from.host_str() == to.host_str() {
        return None;
    }
    let refused = refusals(to).await;
    if refused.is_empty() {
        return None;
    }
    let like = refusals(from).await;
    let astray = refused.iter().any(|why| !like.contains(why));
    astray.then_some("led to a loopback, link-local or metadata address")
}

/// Why addresses that the URL's host stands for are refused.
async fn refusals(url: &Url) -> Vec<&'static str> {
    let host = url.host_str().unwrap_or_default();
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let addresses = match host.parse::<IpAddr>() {
        Ok(address) => vec![address],
        Err(_) => resolved(host, url.port_or_known_default().unwrap_or_default()).await,
    };
    let policy = Policy::default();
    let refused = addresses.into_iter();
    refused
        .filter_map(|address| refused_address(address, &policy))
        .collect()
}

/// Nothing where the name is not known here: then a proxy resolves it, or the request fails.
async fn resolved(host: &str, port: u16) -> Vec<IpAddr> {
    let looking = tokio::net::lookup_host((host, port));
    match tokio::time::timeout(RESOLVE_DEADLINE, looking).await {
        Ok(Ok(found)) => found.map(|address| address.ip()).collect(),
        Ok(Err(_)) | Err(_) => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn repository_leads_to_no_address_of_this_machine() {
        for (from, to, astray) in [
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
            let why = leads_astray(&from_url, &to_url).await;
            assert_eq!(why.is_some(), astray, "{from} {to}");
        }
    }
}
