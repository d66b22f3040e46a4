class Client:
    def __init__(self, config):
        pass

    async def get_response(self, prompt, model, sampling_args, tools=None, **others):
        native = [await self.to_native_tool(tool) for tool in tools]
        messages, _ = await self.to_native_prompt(prompt)
        response = await self.get_native_response(messages, model, sampling_args, native, **others)
        await self.raise_from_native_response(response)
        return await self.from_native_response(response)
