//! The member sources that the flags name.

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::Client;

use crate::args::Settings;
use crate::discovery::cluster_api::ClusterApi;
use crate::discovery::cluster_profile::{ClusterProfiles, ProfileAccess};
use crate::discovery::kamaji::Kamaji;
use crate::discovery::kubeconfig_files::KubeconfigFiles;
use crate::discovery::labelled_secrets::LabelledSecrets;
use crate::discovery::object_and_secret::PairedClusters;
use crate::discovery::{Provider, SourceKind};

/// The providers that the settings select.
pub(super) fn providers(
    client: &Client,
    settings: &Settings,
    profile_access: &Arc<ProfileAccess>,
) -> Vec<Arc<dyn Provider>> {
    let discovery = &settings.discovery;
    let policy = settings.kubeconfig_policy();
    let cluster_namespaces = discovery.cluster_namespaces.as_ref();
    let of_kind = |kind: &SourceKind| match kind {
        SourceKind::Secret => {
            per_namespace(discovery.namespaces.as_ref(), |namespace| LabelledSecrets {
                client: client.clone(),
                namespace,
                label: discovery.label.clone(),
                key: discovery.key.clone(),
                policy,
            })
        }
        SourceKind::ClusterProfile => {
            per_namespace(cluster_namespaces, |namespace| ClusterProfiles {
                client: client.clone(),
                namespace,
                access: Arc::clone(profile_access),
            })
        }
        SourceKind::Cluster => per_namespace(cluster_namespaces, |namespace| PairedClusters {
            client: client.clone(),
            namespace,
            policy,
            pairing: ClusterApi,
        }),
        SourceKind::TenantControlPlane => {
            per_namespace(cluster_namespaces, |namespace| PairedClusters {
                client: client.clone(),
                namespace,
                policy,
                pairing: Kamaji {
                    key: discovery.kamaji_key.clone(),
                    generator: discovery.kamaji_generator.clone(),
                },
            })
        }
        // One each: a mount that is missing or hangs is no other's concern.
        SourceKind::File => {
            let files = discovery.paths.iter();
            files
                .map(|path| Arc::new(KubeconfigFiles::new(path, policy)) as Arc<dyn Provider>)
                .collect()
        }
    };
    discovery.providers.iter().flat_map(of_kind).collect()
}

/// One provider per namespace: an unreadable namespace does not affect the others. `None` means all namespaces.
fn per_namespace<P: Provider>(
    namespaces: Option<&BTreeSet<String>>,
    provider: impl Fn(Option<String>) -> P,
) -> Vec<Arc<dyn Provider>> {
    let provider = |namespace| Arc::new(provider(namespace)) as Arc<dyn Provider>;
    match namespaces {
        None => vec![provider(None)],
        Some(names) => names.iter().cloned().map(Some).map(provider).collect(),
    }
}
