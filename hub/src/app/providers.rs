//! The member sources that the flags name.

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::Client;

use crate::args::{Discovery, ProviderKind, Settings};
use crate::discovery::cluster_api::ClusterApi;
use crate::discovery::cluster_profile::{ClusterProfiles, ProfileAccess};
use crate::discovery::kamaji::Kamaji;
use crate::discovery::kubeconfig_files::KubeconfigFiles;
use crate::discovery::labelled_secrets::LabelledSecrets;
use crate::discovery::object_and_secret::PairedClusters;
use crate::discovery::{MemberPrefixes, Provider, SourceKind};

/// The providers that the settings select.
pub(super) fn providers(
    client: &Client,
    settings: &Settings,
    profile_access: &Arc<ProfileAccess>,
) -> Vec<Arc<dyn Provider>> {
    let mut providers: Vec<Arc<dyn Provider>> = Vec::new();
    let discovery = &settings.discovery;
    for kind in &discovery.providers {
        match kind {
            ProviderKind::Kubeconfig => {
                for namespace in namespaces_or_all(discovery.namespaces.as_ref()) {
                    providers.push(Arc::new(LabelledSecrets {
                        client: client.clone(),
                        namespace,
                        label: discovery.label.clone(),
                        key: discovery.key.clone(),
                        policy: settings.kubeconfig_policy(),
                    }));
                }
            }
            ProviderKind::ClusterProfile => {
                for namespace in namespaces_or_all(discovery.cluster_namespaces.as_ref()) {
                    providers.push(Arc::new(ClusterProfiles {
                        client: client.clone(),
                        namespace,
                        access: Arc::clone(profile_access),
                    }));
                }
            }
            ProviderKind::ClusterApi => {
                for namespace in namespaces_or_all(discovery.cluster_namespaces.as_ref()) {
                    providers.push(Arc::new(PairedClusters {
                        client: client.clone(),
                        namespace,
                        policy: settings.kubeconfig_policy(),
                        pairing: ClusterApi,
                    }));
                }
            }
            ProviderKind::Kamaji => {
                for namespace in namespaces_or_all(discovery.cluster_namespaces.as_ref()) {
                    let pairing = Kamaji {
                        key: discovery.kamaji_key.clone(),
                        generator: discovery.kamaji_generator.clone(),
                    };
                    providers.push(Arc::new(PairedClusters {
                        client: client.clone(),
                        namespace,
                        policy: settings.kubeconfig_policy(),
                        pairing,
                    }));
                }
            }
            ProviderKind::File => {
                // One each: a mount that is missing or hangs is no other's concern.
                for path in &discovery.paths {
                    providers.push(Arc::new(KubeconfigFiles::new(
                        path,
                        settings.kubeconfig_policy(),
                    )));
                }
            }
        }
    }
    providers
}

/// The prefixes of member names that the settings contain. The prefix for Secrets also applies to the
/// Secrets of KryptonDeployments.
pub(super) fn member_prefixes(discovery: &Discovery) -> MemberPrefixes {
    let prefixes = discovery.member_prefixes.iter();
    let by_source = prefixes.map(|(kind, prefix)| {
        let kind = match kind {
            ProviderKind::Kubeconfig => SourceKind::Secret,
            ProviderKind::ClusterProfile => SourceKind::ClusterProfile,
            ProviderKind::ClusterApi => SourceKind::Cluster,
            ProviderKind::Kamaji => SourceKind::TenantControlPlane,
            ProviderKind::File => SourceKind::File,
        };
        (kind, prefix.clone())
    });
    by_source.collect()
}

/// One provider per namespace: an unreadable namespace does not affect the others. `None` means all namespaces.
fn namespaces_or_all(namespaces: Option<&BTreeSet<String>>) -> Vec<Option<String>> {
    match namespaces {
        None => vec![None],
        Some(names) => names.iter().cloned().map(Some).collect(),
    }
}
