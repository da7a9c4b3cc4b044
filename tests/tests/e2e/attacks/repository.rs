//! Plays a chart repository with links to the hub's machine and harmful archives.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};

use axum::Router;
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use flate2::Compression;
use flate2::write::GzEncoder;
use krypton_tests::fleet::{ValuesFile, chart_flags_at, values_flag};
use krypton_tests::{ChartRepository, ChartSource, Mode, Pair, Parts, TestResult};
use krypton_types::fingerprint::sha256_hex;
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;

use super::TrapServer;

const BOMB: u64 = 200 << 20;

/// Returns an address of this machine other than loopback, if any.
fn external_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
    let address = socket.local_addr().ok()?.ip();
    Some(address).filter(|address| !address.is_loopback() && !address.is_unspecified())
}

/// Returns a chart archive with one more entry of this path and size.
fn archive(version: &str, path: &str, size: u64) -> Vec<u8> {
    let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
    let chart = format!("{{apiVersion: v2, name: small, version: {version}}}");
    let mut add = |path: &str, size: u64, content: &mut dyn std::io::Read| {
        let mut header = tar::Header::new_gnu();
        // The library refuses to write a path with `..`.
        header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
        header.set_size(size);
        header.set_mode(0o644);
        header.set_cksum();
        tar.append(&header, content).unwrap();
    };
    add(
        "small/Chart.yaml",
        chart.len() as u64,
        &mut chart.as_bytes(),
    );
    add(path, size, &mut std::io::repeat(b' ').take(size));
    tar.into_inner().unwrap().finish().unwrap()
}

#[derive(Clone, Default)]
struct HostileRepository {
    files: BTreeMap<String, Vec<u8>>,
    redirects: BTreeMap<String, String>,
    entries: String,
}

impl HostileRepository {
    /// Lists a version with the digest of `content` and the download URL `url`.
    fn list(&mut self, version: &str, url: &str, content: &[u8]) {
        let digest = sha256_hex(content);
        self.entries += &format!(
            "  - {{apiVersion: v2, name: small, version: {version}, digest: {digest}, urls: ['{url}']}}\n"
        );
    }

    fn serve(&mut self, version: &str, content: Vec<u8>) {
        let path = format!("small-{version}.tgz");
        self.list(version, &path, &content);
        self.files.insert(format!("/{path}"), content);
    }

    fn respond(&self, uri: &Uri) -> Response {
        if uri.path() == "/index.yaml" {
            return format!("apiVersion: v1\nentries:\n  small:\n{}", self.entries).into_response();
        }
        if let Some(to) = self.redirects.get(uri.path()) {
            return (StatusCode::FOUND, [(header::LOCATION, to.clone())]).into_response();
        }
        match self.files.get(uri.path()) {
            Some(file) => file.clone().into_response(),
            None => StatusCode::NOT_FOUND.into_response(),
        }
    }
}

#[tokio::test]
async fn hostile_repository_reaches_nothing() -> TestResult {
    let trap = TrapServer::start().await;
    let address = external_address().unwrap_or(Ipv4Addr::LOCALHOST.into());
    // A repository on loopback may redirect to loopback.
    let away = match address.is_loopback() {
        true => "http://169.254.169.254".to_owned(),
        false => format!("http://{}", trap.address),
    };
    let charts = [ChartSource::small("1.0.0")];
    let package = ChartRepository::start(&charts).await?.files();
    let (_, package) = package
        .iter()
        .find(|(path, _)| path.ends_with("tgz"))
        .unwrap();
    let mut hostile = HostileRepository::default();
    hostile.serve("1.0.0", package.to_vec());
    hostile.list("2.0.0", &format!("{away}/small-2.0.0.tgz"), package);
    hostile.list("3.0.0", "onwards.tgz", package);
    let redirect_target = format!("{away}/small-3.0.0.tgz");
    hostile
        .redirects
        .insert("/onwards.tgz".to_owned(), redirect_target);
    let marker = "krypton-attack-mark";
    let path = format!("small/../../../../../../../../tmp/{marker}");
    hostile.serve("4.0.0", archive("4.0.0", &path, 16));
    hostile.serve("5.0.0", archive("5.0.0", "small/values.yaml", BOMB));
    hostile.list("6.0.0", "small-1.0.0.tgz", b"another content");
    let listener = TcpListener::bind((address, 0)).await?;
    let url = format!("http://{}", listener.local_addr()?);
    let app = Router::new().fallback(move |uri: Uri| async move { hostile.respond(&uri) });
    let serving = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    let _serving = AbortOnDropHandle::new(serving);

    let values = ValuesFile::new("replicaCount: 0")?;
    let mut pair = Pair::start("attack-charts", Mode::SelfCluster, Parts::WithControllers).await?;
    let flags = |version: &str| {
        let mut flags = chart_flags_at(&url, "small", version);
        flags.push(values_flag(&values));
        flags
    };
    pair.start_hub_and_join(flags("1.0.0")).await?;
    let fleet_client = pair.fleet_client();
    fleet_client.install("acme").await?;
    let release = pair.release("acme");
    let before = fleet_client.releases().await?;
    let error = pair.condition("ClusterError");
    for (version, expected_text) in [
        ("2.0.0", "led to a loopback, link-local or metadata address"),
        ("3.0.0", "led to a loopback, link-local or metadata address"),
        ("4.0.0", ".."),
        ("5.0.0", "is larger than"),
        ("6.0.0", "sha256 is"),
    ] {
        pair.stop().await?;
        pair.start_hub_and_join(flags(version)).await?;
        let refused = (error.as_str(), "True", "ChartNotLoaded");
        fleet_client.wait_for("acme", &[refused]).await?;
        pair.hub()?.wait_for_log(expected_text).await?;
        assert_eq!(fleet_client.releases().await?, before, "{version}");
    }
    let revisions = fleet_client.revisions("acme", &release).await?;
    assert_eq!(revisions, [(1, "deployed".to_owned())]);
    assert_eq!(trap.connections(), 0);
    assert!(!std::env::temp_dir().join(marker).exists());
    Ok(())
}
