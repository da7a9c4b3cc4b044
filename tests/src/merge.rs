//! Merge patches of objects.

use std::fmt::Debug;

use futures::{FutureExt as _, future::BoxFuture};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

pub trait Merge<K> {
    /// Merges the patch into the object of this name.
    fn merge<'a>(&'a self, name: &'a str, patch: &'a Value) -> BoxFuture<'a, kube::Result<K>>;

    /// Merges these fields into the status of the object of this name.
    fn merge_status<'a>(&'a self, name: &'a str, status: Value) -> BoxFuture<'a, kube::Result<K>>;
}

impl<K: Clone + DeserializeOwned + Debug + Send + Sync> Merge<K> for Api<K> {
    fn merge<'a>(&'a self, name: &'a str, patch: &'a Value) -> BoxFuture<'a, kube::Result<K>> {
        let patch = async move {
            self.patch(name, &PatchParams::default(), &Patch::Merge(patch))
                .await
        };
        patch.boxed()
    }

    fn merge_status<'a>(&'a self, name: &'a str, status: Value) -> BoxFuture<'a, kube::Result<K>> {
        let patch = async move {
            let patch = Patch::Merge(json!({ "status": status }));
            self.patch_status(name, &PatchParams::default(), &patch)
                .await
        };
        patch.boxed()
    }
}
