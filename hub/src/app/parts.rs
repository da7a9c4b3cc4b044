//! The parts of the process that need neither home nor a Lease: Helm and the charts.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use krypton_helm::chart::{ChartCache, CurrentCredentials};
use krypton_helm::driver::{Helm, HelmConfig, Keyring, Processes};
use krypton_reconciler::drift::DriftMetrics;
use krypton_reconciler::metrics::WorkMetrics;
use krypton_runtime::periodic::file;
use krypton_runtime::scratch;
use krypton_runtime::watchdog::Watchdog;
use tempfile::TempDir;
use tokio::sync::watch;

use crate::args::Settings;
use crate::chart::{credentials, helm_credentials};
use crate::discovery::SourceKind;
use crate::discovery::cluster_profile::ProfileAccess;
use crate::discovery::cluster_profile::provider_file::ProviderFile;

/// Helm, the charts, and the folders that both use.
pub(super) struct Engine {
    pub(super) helm: Arc<Helm>,
    pub(super) charts: Arc<ChartCache>,
    pub(super) work: WorkMetrics,
    pub(super) drift: DriftMetrics,
    pub(super) credentials: watch::Receiver<CurrentCredentials>,
    pub(super) profile_access: Arc<ProfileAccess>,
    /// For files with secrets.
    pub(super) private: TempDir,
    /// Removed with the process.
    _scratch: TempDir,
}

impl Engine {
    pub(super) async fn start(
        settings: &Settings,
        watchdog: &Watchdog,
        processes: Arc<dyn Processes>,
    ) -> anyhow::Result<(Self, watch::Sender<CurrentCredentials>)> {
        let scratch = scratch::folder(&settings.helm.cache_dir, "hub", "--helm-cache-dir")?;
        let private = scratch::private(settings.helm.private_dir.as_deref(), &scratch, "hub")?;
        let profile_access = profile_access(settings, watchdog, private.path()).await?;
        let work = WorkMetrics::default();
        let helm = Helm::new(HelmConfig {
            binary: settings.helm.program.clone(),
            processes,
            scratch: scratch.path().join("helm"),
            private: private.path().join("helm"),
            max_concurrent: settings.helm.max_concurrent,
            max_per_member: settings.helm.max_per_member(),
        });
        let helm = Arc::new(helm.await?.with_metrics(&work.helm));
        let (sender, credentials) = watch::channel(credentials::NOT_READ.map_err(Into::into));
        let mut charts = ChartCache::new(scratch.path().join("charts"))?
            .with_metrics(&work.charts)
            .with_plain_http(settings.chart.plain_http);
        if settings.chart.credentials_secret.is_some() {
            charts = charts.with_credentials(credentials.clone());
        }
        if let Some(file) = &settings.helm_credentials
            && let Some(read) = helm_credentials::read(file, &settings.chart.repo).await?
        {
            charts = charts.with_credentials(watch::channel(Ok(Arc::new(read))).1);
        }
        if let Some(file) = settings.chart.keyring.clone() {
            check_keyring(&file).await?;
            let helm = Arc::clone(&helm);
            charts = charts.with_signature_verifier(Arc::new(Keyring { helm, file }));
        }
        let engine = Self {
            helm,
            charts: Arc::new(charts),
            work,
            drift: DriftMetrics::default(),
            credentials,
            profile_access,
            private,
            _scratch: scratch,
        };
        Ok((engine, sender))
    }
}

async fn profile_access(
    settings: &Settings,
    watchdog: &Watchdog,
    private: &Path,
) -> anyhow::Result<Arc<ProfileAccess>> {
    let discovery = &settings.discovery;
    let profiles = discovery.providers.contains(&SourceKind::ClusterProfile);
    let file = discovery.provider_file.as_deref().filter(|_| profiles);
    let providers = match file {
        Some(path) => Some(ProviderFile::load(path).await?),
        None => None,
    };
    let policy = settings.kubeconfig_policy();
    ProfileAccess::start(watchdog, file, providers, private, policy).context(
        "failed to create a folder for credentials of ClusterProfiles; set another folder with --private-dir",
    )
}

/// Opens the keyring once, as its mount may hang.
async fn check_keyring(file: &Path) -> anyhow::Result<()> {
    let keyring = file.to_owned();
    let opened = file::with_deadline(file::DEADLINE, move || std::fs::File::open(keyring)).await;
    let path = file.display();
    let opened = opened.with_context(|| {
        format!("--chart-keyring: {path} does not respond; check whether its mount hangs")
    })?;
    opened.with_context(|| {
        format!(
            "--chart-keyring: {path} cannot be read; name the file that 'gpg --export' has written"
        )
    })?;
    Ok(())
}
