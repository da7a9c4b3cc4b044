//! Labelled kubeconfig Secrets, in one namespace or in all.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Secret;
use krypton_types::kubeconfig::Policy;
use krypton_types::names;
use kube::runtime::watcher::Config;
use kube::{Client, ResourceExt as _};

use super::kubeconfig_secret;
use super::provider::{self, ProviderState, WatchedObjects, by_origin};
use super::{Origin, Provider, ProviderHandle, Source, SourceKind};

/// Provider of the labelled Secrets of one namespace, or of all.
pub(crate) struct LabelledSecrets {
    pub client: Client,
    /// `None` means all namespaces.
    pub namespace: Option<String>,
    /// Label key; its value must be `true`.
    pub label: String,
    /// Key of the kubeconfig, unless an annotation names another.
    pub key: String,
    pub policy: Policy,
}

impl Provider for LabelledSecrets {
    fn describe(&self) -> String {
        let namespace = self.namespace.as_deref().unwrap_or("*");
        format!("Secrets {namespace}/* with label {}", self.label)
    }

    fn covers(&self, origin: &Origin) -> bool {
        origin.is_in(SourceKind::Secret, self.namespace.as_ref())
    }

    fn follow(self: Arc<Self>, handle: ProviderHandle) -> BoxFuture<'static, ()> {
        let config = Config::default().labels(&format!("{}=true", self.label));
        let (label, key, policy) = (self.label.clone(), self.key.clone(), self.policy);
        let read = move |secret| read(&secret, (&label, &key), &policy).map(Arc::new);
        let secrets =
            WatchedObjects::secrets(&self.client, self.namespace.as_deref(), config, read);
        let client = self.client.clone();
        provider::run(LabelledList { client, secrets }, handle).boxed()
    }
}

/// The labelled Secrets, each with its source.
struct LabelledList {
    client: Client,
    secrets: WatchedObjects<Secret, Arc<Source>>,
}

impl ProviderState for LabelledList {
    async fn changed(&mut self) -> bool {
        self.secrets.changed().await;
        true
    }

    async fn reread(&mut self, origin: &Origin) {
        if let Some(secret) = kubeconfig_secret::reread(&self.client, origin, &origin.name).await {
            self.secrets.store_object(secret);
        }
    }

    fn sources(&mut self) -> Option<BTreeMap<Origin, Arc<Source>>> {
        Some(by_origin(self.secrets.known()?.values()))
    }

    fn trouble(&self) -> Option<String> {
        self.secrets.trouble()
    }
}

/// Reads one Secret. Returns `None` if it doesn't represent a member.
pub fn read(
    secret: &Secret,
    (label, default_key): (&str, &str),
    policy: &Policy,
) -> Option<Source> {
    let meta = &secret.metadata;
    let name = meta.name.as_deref()?;
    let labelled = secret.labels().get(label).map(String::as_str) == Some("true");
    if !labelled || meta.deletion_timestamp.is_some() {
        return None;
    }
    if name == names::SELF_CLUSTER {
        tracing::debug!(
            namespace = meta.namespace.as_deref(),
            secret = %name,
            "ignoring the content of the home cluster's Secret"
        );
        return None;
    }
    let key = secret.annotations().get(names::KUBECONFIG_KEY_ANNOTATION);
    let key = key.map_or(default_key, String::as_str);
    let source = Source::from_object(SourceKind::Secret, meta);
    let object = source.origin.to_string();
    let missing = format!(
        ": put the cluster's kubeconfig there, or name another key with the annotation {} or with --kubeconfig-key",
        names::KUBECONFIG_KEY_ANNOTATION
    );
    Some(Source {
        access: kubeconfig_secret::kubeconfig(secret, &object, key, &missing, policy),
        ..source
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;

    use super::*;

    fn labelled(name: &str) -> Secret {
        let mut secret = Secret::default();
        secret.metadata.name = Some(name.to_owned());
        secret.metadata.namespace = Some("krypton".to_owned());
        secret.metadata.labels = Some([("there".to_owned(), "true".to_owned())].into());
        secret
    }

    fn read_labelled(secret: &Secret) -> Option<Source> {
        read(secret, ("there", "kubeconfig"), &Policy::default())
    }

    #[test]
    fn secret_without_key_is_member_with_named_fault() {
        let mut secret = labelled("edge-1");
        secret.data = Some([("other".to_owned(), ByteString(Vec::new()))].into());
        let fault = read_labelled(&secret).unwrap().access.unwrap_err().message;
        assert!(fault.contains("krypton/edge-1"), "{fault}");
        assert!(fault.contains("\"kubeconfig\""), "{fault}");
    }

    #[test]
    fn annotations_set_kubeconfig_key_and_member_name() {
        let mut secret = labelled("edge-1");
        secret.metadata.annotations = Some(
            [
                (
                    names::KUBECONFIG_KEY_ANNOTATION.to_owned(),
                    "value".to_owned(),
                ),
                (names::MEMBER_NAME_ANNOTATION.to_owned(), "paris".to_owned()),
            ]
            .into(),
        );
        let source = read_labelled(&secret).unwrap();
        assert_eq!((source.member.as_str(), source.is_renamed), ("paris", true));
        assert!(source.access.unwrap_err().message.contains("\"value\""));
    }

    #[test]
    fn unlabelled_deleting_or_self_secret_is_ignored() {
        let mut secret = labelled("edge-1");
        secret.metadata.labels = Some([("there".to_owned(), "false".to_owned())].into());
        assert!(read_labelled(&secret).is_none());
        let mut secret = labelled("edge-1");
        let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH);
        secret.metadata.deletion_timestamp = Some(now);
        assert!(read_labelled(&secret).is_none());
        assert!(read_labelled(&labelled(names::SELF_CLUSTER)).is_none());
    }
}
