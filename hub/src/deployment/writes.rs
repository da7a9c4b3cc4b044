//! What is read and written of KryptonDeployments on home: one request each, with a deadline and on top of
//! what the decision was made on.

use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_agent::effect;
use krypton_common::deployment::DeploymentKey;
use krypton_common::error_chain::chain;
use krypton_crds::krypton_deployment::{KryptonDeployment, KryptonDeploymentStatus};
use kube::Client;
use kube::ResourceExt as _;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;

use super::decision::{Deletion, News};

const DEADLINE: Duration = Duration::from_secs(10);

/// What is to be written of one object.
#[derive(Debug)]
pub(super) enum Write {
    Finalizers(Vec<String>),
    Status(KryptonDeploymentStatus),
}

/// A write that has ended.
pub(super) struct Written {
    pub(super) key: DeploymentKey,
    /// The version that it was made on.
    pub(super) before: Option<String>,
    /// `None` when nothing was written.
    pub(super) object: Option<KryptonDeployment>,
    /// Places were written, and are not there.
    pub(super) forgotten: bool,
    /// To be told now.
    pub(super) news: Vec<News>,
}

pub(super) async fn write(
    client: Client,
    key: DeploymentKey,
    before: Option<String>,
    write: Write,
    news: Vec<News>,
) -> Written {
    let api: Api<KryptonDeployment> = Api::namespaced(client, &key.namespace);
    let params = PatchParams::default();
    let call = async {
        match &write {
            Write::Finalizers(finalizers) => {
                let patch = Patch::Merge(json!({ "metadata": {
                    "resourceVersion": before,
                    "finalizers": finalizers,
                }}));
                let call = api.patch(&key.name, &params, &patch);
                effect!("deployment.finalizers", call).await
            }
            Write::Status(status) => {
                let patch = Patch::Merge(json!({
                    "metadata": { "resourceVersion": before },
                    "status": status,
                }));
                let call = api.patch_status(&key.name, &params, &patch);
                effect!("deployment.status", call).await
            }
        }
    };
    let object = match tokio::time::timeout(DEADLINE, call).await {
        Ok(Ok(object)) => Some(object),
        // Somebody was faster, or it is gone: the watch tells.
        Ok(Err(kube::Error::Api(status))) if status.code == 409 || status.code == 404 => None,
        Ok(Err(error)) => {
            tracing::warn!(deployment = %key, error = %chain(&error), "writing a KryptonDeployment failed; it is tried again");
            None
        }
        Err(_) => {
            tracing::warn!(deployment = %key, "writing a KryptonDeployment: no answer in time; it is tried again");
            None
        }
    };
    let wrote = match &write {
        Write::Status(status) => status.places.as_ref(),
        Write::Finalizers(_) => None,
    };
    let kept = |object: &KryptonDeployment| object.status.as_ref()?.places.as_ref().map(drop);
    let forgotten = wrote.is_some() && object.as_ref().is_some_and(|it| kept(it).is_none());
    Written {
        key,
        before,
        object,
        forgotten,
        news,
    }
}

/// A deletion that was read afresh; `None` when it could not be, or there is none.
pub(super) struct Reading {
    pub(super) key: DeploymentKey,
    pub(super) uid: String,
    pub(super) found: Option<Deletion>,
}

pub(super) async fn read(client: Client, key: DeploymentKey, uid: String) -> Reading {
    let reading = async {
        let objects: Api<KryptonDeployment> = Api::namespaced(client.clone(), &key.namespace);
        let object = objects.get_metadata(&key.name).await?;
        let deleted = object.metadata.uid.as_deref() == Some(&uid)
            && object.metadata.deletion_timestamp.is_some();
        if !deleted {
            return Ok(None);
        }
        let crds: Api<CustomResourceDefinition> = Api::all(client);
        let crd = crds
            .get_metadata(&KryptonDeployment::crd().name_any())
            .await?;
        Ok(Some(match crd.metadata.deletion_timestamp {
            Some(_) => Deletion::OfTheCrd,
            None => Deletion::OfTheObject,
        }))
    };
    let found = match tokio::time::timeout(DEADLINE, reading).await {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => {
            let error: kube::Error = error;
            tracing::warn!(deployment = %key, problem = %chain(&error), "reading the deletion of the KryptonDeployment failed; it is tried again");
            None
        }
        Err(_) => {
            tracing::warn!(deployment = %key, "reading the deletion of the KryptonDeployment: no answer in time; it is tried again");
            None
        }
    };
    Reading { key, uid, found }
}
