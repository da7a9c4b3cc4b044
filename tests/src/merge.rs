//! Merge patches of objects.

use std::fmt::Debug;

use futures::{FutureExt as _, future::BoxFuture};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde::de::DeserializeOwned;
use serde_json::Value;

pub trait Merge<K> {
    /// Merges the patch into the object of this name.
    fn merge<'a>(&'a self, name: &'a str, patch: &'a Value) -> BoxFuture<'a, kube::Result<K>>;
}

impl<K: Clone + DeserializeOwned + Debug + Send + Sync> Merge<K> for Api<K> {
    fn merge<'a>(&'a self, name: &'a str, patch: &'a Value) -> BoxFuture<'a, kube::Result<K>> {
        let patch = async move {
            self.patch(name, &PatchParams::default(), &Patch::Merge(patch))
                .await
        };
        patch.boxed()
    }
}
